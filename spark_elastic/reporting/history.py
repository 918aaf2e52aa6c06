"""What a training has measured: a row per epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spark_elastic.errors import CheckpointError

Row = Mapping[str, float | int]
FACTS = ("epoch", "steps", "rows", "seconds", "ended", "lr")
"""Columns that no loss and no metric has made."""


class History(Sequence[Row]):
    """The rows of the epochs that were done, oldest first. Not changed once it is made.

    A row holds "epoch" (from 0), "steps" (optimizer steps so far), "rows" (seen in this epoch), "seconds" (wall),
    "ended" (since 1970), "lr", "loss", the metrics by name, and with a validation split "val_loss" and the metrics as
    "val_…".
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = tuple(dict(row) for row in rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        """A row by its index, or a column, oldest first, by its name."""
        if isinstance(at, str):
            if not any(at in row for row in self._rows):
                raise KeyError(f"{at!r}; there are {', '.join(self.names) or 'no rows'}")
            return [row.get(at) for row in self._rows]
        return self._rows[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(tuple(tuple(row.items()) for row in self._rows))

    def __deepcopy__(self, memo: Any) -> History:
        return self  # copied after every step of a training

    def __repr__(self) -> str:
        return f"History({list(self._rows)!r})"

    @property
    def names(self) -> list[str]:
        """Of all columns."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def with_row(self, row: Row) -> History:
        return History((*self._rows, row))

    def best(self, name: str, mode: str = "min") -> Row:
        """The row with the least ("min") or largest ("max") value. Raises: KeyError: no row has it."""
        rows = [row for row in self._rows if name in row]
        if not rows:
            raise KeyError(name)
        return (min if mode == "min" else max)(rows, key=lambda row: row[name])

    def to_json(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._rows]

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1)

    @classmethod
    def from_json(cls, document: Any) -> History:
        """Raises: CheckpointError: not what `to_json` gives."""
        if not isinstance(document, list) or not all(isinstance(row, dict) for row in document):
            raise CheckpointError("not a history: a list of rows was expected")
        return cls(document)
