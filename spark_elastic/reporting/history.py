"""The history of a training, a row of measured values for each epoch, and plots of trainings and jobs.

matplotlib, an extra, is imported for the first plot only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, overload

from spark_elastic.errors import CheckpointError, MissingExtraError
from spark_elastic.membership.reasons import counted

Row = Mapping[str, float | int]
EventRow = Mapping[str, Any]  # one row of `event_log.event_rows`
FACTS = ("epoch", "steps", "rows", "seconds", "ended", "lr")  # the columns that are not a loss or a metric


class History(Sequence[Row]):
    """The rows of the finished epochs, oldest first. Immutable.

    A row holds "epoch" (from 0), "steps" (optimizer steps so far), "rows" (seen in this epoch), "seconds" (duration),
    "ended" (seconds since 1970), "lr", "loss" and the metrics by name; with a validation split also "val_loss" and
    each metric as "val_<name>".

    Attributes:
        work: A row for each epoch and rank: "epoch", "rank", "work_s" and "wait_s", the seconds that it worked and
            waited for the others in steps of full batches, since the workers last changed. No rows where they are
            unknown, and for worlds of one. Histories are compared without it.
    """

    def __init__(self, rows: Sequence[Row] = (), work: Sequence[Row] = ()) -> None:
        self._rows = tuple(dict(row) for row in rows)
        self.work = tuple(dict(row) for row in work)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: str) -> list[float]: ...
    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: Any) -> Any:
        """Return a row by its index, or a column by its name, oldest first."""
        if isinstance(at, str):
            if not any(at in row for row in self._rows):
                raise KeyError(f"{at!r}; there are {', '.join(self.names) or 'no rows'}")
            return [row.get(at) for row in self._rows]
        return self._rows[at]

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

    def with_row(self, row: Row, work: Sequence[Row] = ()) -> History:
        """Return the history with one more row, and more rows of `work`."""
        return History((*self._rows, row), (*self.work, *work))

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
    def from_json(cls, document: Any, work: Any = None) -> History:
        """Rebuild a history from the value that `to_json` returned, and its `work`.

        Raises:
            CheckpointError: if it is something else.
        """
        for rows in (document, work := [] if work is None else work):
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise CheckpointError(f"not a history: expected a list of rows, got {type(rows).__name__}")
        return cls(document, work)


def draw_training(history: History, events: Sequence[EventRow], path: str | Path | None) -> Any:
    """Plot a training, also to the file `path`; return a Figure. Raise MissingExtraError without matplotlib."""
    columns = dict.fromkeys(name for row in history for name in row if name not in FACTS)
    rows = sum(row.get("rows", 0) for row in history)
    title = f"{counted(len(history), 'epoch')}, {rows:,} rows; {_losses_in_words(events)}"
    return _saved(_figures().of_training(history, history.work, columns, events, title), path)


def draw_job(events: Sequence[EventRow], name: str, path: str | Path | None) -> Any:
    """Plot the number of workers of a job over time. Arguments, result and errors are those of `draw_training`."""
    return _saved(_figures().of_job(events, f"job {name}: {_losses_in_words(events)}"), path)


def _figures() -> ModuleType:
    try:
        from spark_elastic.reporting import figure

        return figure
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingExtraError(what="plot()", package="matplotlib", extra="plot") from None


def _saved(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        # the title as text, too, for whoever describes the picture; only PNG has this field
        about = {"metadata": {"Title": figure.get_suptitle()}} if Path(path).suffix == ".png" else {}
        figure.savefig(path, dpi=110, **about)
    return figure


def _losses_in_words(events: Sequence[EventRow]) -> str:
    sizes = [row["after"] for row in events if row["kind"] not in ("waiting", "finished", "failed") and row["after"]]
    lost = sum(row["before"] - row["after"] for row in events if row["kind"] == "lost")
    joined = sum(row["after"] - row["before"] for row in events if row["kind"] == "joined")
    least, most = (min(sizes), max(sizes)) if sizes else (0, 0)
    workers = f"{least} to {most} workers" if least < most else counted(most, "worker")
    steps = sum(row["steps_lost"] or 0 for row in events)
    cost = f", {steps or 'no'} step{'s' if steps > 1 else ''} lost" if lost or joined else ""
    return f"{workers}, {lost or 'none'} lost, {joined or 'none'} joined{cost}" if lost or joined else workers
