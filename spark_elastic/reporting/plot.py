"""Pictures of trainings and jobs. matplotlib, an extra, is imported when the first one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from spark_elastic.errors import MissingExtraError
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.format import wait_on_bar

Row = Mapping[str, Any]


def draw_training(history: Sequence[Row], events: Sequence[Row], path: str | Path | None) -> Any:
    """Returns: a matplotlib Figure, also written to `path`. Raises: MissingExtraError: there is no matplotlib."""
    return _kept(_picture().of_training(history, events, _title(history, events)), path)


def draw_job(events: Sequence[Row], name: str, path: str | Path | None) -> Any:
    """As `draw_training`, of the world alone."""
    return _kept(_picture().of_job(events, f"job {name}: {_storms(events)}"), path)


def event_rows(changes: Sequence[MembershipChange], began: float) -> tuple[dict[str, Any], ...]:
    """The changes of a job as plain values. began: in seconds since 1970, as the changes' times."""
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


def _picture() -> ModuleType:
    try:
        from spark_elastic.reporting import figure

        return figure
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingExtraError(what="plot()", package="matplotlib", extra="plot") from None


def _kept(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        _picture().save(figure, path)
    return figure


def _title(history: Sequence[Row], events: Sequence[Row]) -> str:
    epochs = "1 epoch" if len(history) == 1 else f"{len(history)} epochs"
    rows = sum(row.get("rows", 0) for row in history)
    return f"{epochs}, {rows:,} rows; {_storms(events)}"


def _storms(events: Sequence[Row]) -> str:
    sizes = [row["after"] for row in events if row["kind"] not in ("waiting", "finished", "failed") and row["after"]]
    lost = sum(row["before"] - row["after"] for row in events if row["kind"] == "lost")
    joined = sum(row["after"] - row["before"] for row in events if row["kind"] == "joined")
    least, most = (min(sizes), max(sizes)) if sizes else (0, 0)
    workers = f"{least} to {most} workers" if least < most else "1 worker" if most == 1 else f"{most} workers"
    steps = sum(row["steps_lost"] or 0 for row in events)
    cost = f", {steps or 'no'} step{'s' if steps > 1 else ''} lost" if lost or joined else ""
    return f"{workers}, {lost or 'none'} lost, {joined or 'none'} joined{cost}" if lost or joined else workers
