"""Plots of trainings and jobs. matplotlib, an extra, is imported for the first plot only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from spark_elastic.errors import MissingExtraError
from spark_elastic.membership.wording import counted
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.format import wait_on_bar

Row = Mapping[str, Any]


def draw_training(history: Sequence[Row], events: Sequence[Row], path: str | Path | None) -> Any:
    """Plot the loss and the metrics of a training over its epochs, with the size of the world.

    Args:
        history: a row for each epoch.
        events: the rows of `event_rows`.
        path: a file to write the plot to as well; None: no file.

    Returns:
        A matplotlib Figure.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    return _saved(_figures().of_training(history, events, _title(history, events)), path)


def draw_job(events: Sequence[Row], name: str, path: str | Path | None) -> Any:
    """Plot the size of the world over time. Otherwise as `draw_training`."""
    return _saved(_figures().of_job(events, f"job {name}: {_losses_in_words(events)}"), path)


def event_rows(changes: Sequence[MembershipChange], began: float) -> tuple[dict[str, Any], ...]:
    """Return the changes of a job as plain values; `began`: seconds since 1970, as the times of the changes."""
    return tuple(
        {
            "seconds": round(change.at - began, 3),
            "time": round(change.at, 3),
            "kind": change.kind,
            "who": change.who,
            "reason": change.reason,
            "before": change.before,
            "after": change.after,
            "pause_s": change.pause_s,
            "steps_lost": change.steps_lost,
            "text": str(change) if change.wait is None else wait_on_bar(change.wait),
        }
        for change in changes
    )


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
        _figures().save(figure, path)
    return figure


def _title(history: Sequence[Row], events: Sequence[Row]) -> str:
    epochs = counted(len(history), "epoch")
    rows = sum(row.get("rows", 0) for row in history)
    return f"{epochs}, {rows:,} rows; {_losses_in_words(events)}"


def _losses_in_words(events: Sequence[Row]) -> str:
    sizes = [row["after"] for row in events if row["kind"] not in ("waiting", "finished", "failed") and row["after"]]
    lost = sum(row["before"] - row["after"] for row in events if row["kind"] == "lost")
    joined = sum(row["after"] - row["before"] for row in events if row["kind"] == "joined")
    least, most = (min(sizes), max(sizes)) if sizes else (0, 0)
    workers = f"{least} to {most} workers" if least < most else counted(most, "worker")
    steps = sum(row["steps_lost"] or 0 for row in events)
    cost = f", {steps or 'no'} step{'s' if steps > 1 else ''} lost" if lost or joined else ""
    return f"{workers}, {lost or 'none'} lost, {joined or 'none'} joined{cost}" if lost or joined else workers
