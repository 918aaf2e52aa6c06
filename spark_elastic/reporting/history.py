"""The history of a training: a row of measured values for each epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spark_elastic.errors import CheckpointError

Row = Mapping[str, float | int]
FACTS = ("epoch", "steps", "rows", "seconds", "ended", "lr")
"""The columns that are not a loss or a metric."""


class History(Sequence[Row]):
    """The rows of the finished epochs, oldest first. Immutable.

    A row holds "epoch" (from 0), "steps" (optimizer steps so far), "rows" (seen in this epoch), "seconds" (duration),
    "ended" (seconds since 1970), "lr", "loss" and the metrics by name; with a validation split also "val_loss" and
    each metric as "val_<name>".
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = tuple(dict(row) for row in rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        """Return a row by its index, or a column by its name, oldest first."""
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
        """The names of all columns."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def with_row(self, row: Row) -> History:
        """Return the history with one more row."""
        return History((*self._rows, row))

    def best(self, name: str, mode: str = "min") -> Row:
        """Return the row with the smallest ("min") or largest ("max") value.

        Raises:
            KeyError: if no row has the column.
        """
        rows = [row for row in self._rows if name in row]
        if not rows:
            raise KeyError(name)
        return (min if mode == "min" else max)(rows, key=lambda row: row[name])

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows as plain values."""
        return [dict(row) for row in self._rows]

    def dumps(self) -> str:
        """Return the rows as a JSON text."""
        return json.dumps(self.to_json(), indent=1)

    @classmethod
    def from_json(cls, document: Any) -> History:
        """Rebuild a history from the value that `to_json` returned.

        Raises:
            CheckpointError: if it is something else.
        """
        if not isinstance(document, list) or not all(isinstance(row, dict) for row in document):
            raise CheckpointError(f"not a history: expected a list of rows, got {type(document).__name__}")
        return cls(document)
