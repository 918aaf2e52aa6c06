"""The figures of trainings and jobs: loss and metrics over the epochs, with the size of the world and its losses below.

Imports matplotlib, so `history` imports this module only for the first plot.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]

MOST_METRICS = 3  # the number of metrics that get a panel beside the loss; further metrics are only in `model.history`
# colours of medium brightness, which are visible on white and on black
TRAIN, VALIDATION, WORLD, GREY = "#3b82c4", "#d9822b", "#6b8e9f", "#888888"
KINDS = {
    "lost": ("lost", "#d64545", "X"),
    "drained": ("drained", "#b07fc7", "v"),
    "left": ("left", "#b07fc7", "v"),
    "joined": ("joined", "#2a9d6f", "^"),
    "broken": ("broken and rebuilt", "#d6a445", "D"),
}  # by the kind of an event: label, colour and marker
LONG_PAUSE = 0.01  # the part of the x axis from which a pause is wide enough to be drawn as a span


class NotebookFigure(Figure):
    """A figure that a notebook shows if a cell returns it, without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()


def of_training(
    history: Sequence[Row], work: Sequence[Row], columns: Iterable[str], events: Sequence[Row], title: str
) -> NotebookFigure:
    """Draw panels for the loss, the metrics (`columns` of the history), `work` and the world over the epochs."""
    measured = list(columns)
    names = [name for name in measured if not (name.startswith("val_") and name[4:] in measured)][: MOST_METRICS + 1]
    figure, panels = _panels(len(names) + bool(work), title)
    place = _epoch_axis(history)
    for panel, name in zip(panels, names, strict=False):
        _draw_column(panel, history, name)
    if names:
        panels[0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, borderaxespad=0.0)
    if work:
        _draw_work(panels[-2], work)
    world = panels[-1]
    end = max((row["epoch"] + 1 for row in history), default=1)
    _draw_world(world, events, place, end)
    for row in events:
        if row["kind"] in KINDS and row["before"]:
            for panel in panels[:-1]:
                panel.axvline(place(row, 0.0), color=KINDS[row["kind"]][1], linewidth=1.0, alpha=0.45, zorder=0.5)
    world.set_xlabel("epoch")
    first = min((row["epoch"] for row in history), default=0)
    world.set_xlim(first, end)
    world.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    begins = [row["time"] - row["seconds"] for row in events]
    times = [(row["epoch"] + 1, row["ended"] - begins[0]) for row in history if begins and "ended" in row]
    _show_times(panels[0], [(epoch, seconds) for epoch, seconds in times if seconds >= 0])
    figure.align_ylabels()
    return figure


def of_job(events: Sequence[Row], title: str) -> NotebookFigure:
    """Draw the size of the world over the seconds of the job."""
    figure, (world,) = _panels(0, title)
    end = max((row["seconds"] + (row["pause_s"] or 0.0) for row in events), default=1.0) or 1.0
    _draw_world(world, events, lambda row, late: row["seconds"] + late, end)
    world.set_xlabel("seconds since the job began")
    world.set_xlim(0, end)
    return figure


def _panels(measured: int, title: str) -> tuple[NotebookFigure, list[Any]]:
    heights = [3.0] * min(measured, 1) + [2.0] * max(measured - 1, 0) + [1.6]
    figure = NotebookFigure(figsize=(9.0, sum(heights) + 0.8), layout="constrained")
    figure.suptitle(title, fontsize="large", x=0.02, ha="left")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for panel in (flat := list(panels[:, 0])):
        panel.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, flat


def _draw_column(panel: Any, history: Sequence[Row], name: str) -> None:
    alone = len(history) < 25  # further points would be a thick line
    for column, label, colour, line in ((name, "train", TRAIN, "-"), (f"val_{name}", "validation", VALIDATION, "--")):
        points = [(row["epoch"] + 1, row[column]) for row in history if row.get(column) is not None]
        if points:
            marks = {"marker": "o", "markersize": 4, "clip_on": False} if alone else {}
            panel.plot(*zip(*points, strict=True), color=colour, linestyle=line, label=label, linewidth=1.8, **marks)
    panel.set_ylabel(name.replace("_", " "))


def _draw_work(panel: Any, work: Sequence[Row]) -> None:
    """Draw the seconds of work and of waiting of each rank; the legend names the ranks with the most of them."""
    ranks = sorted({row["rank"] for row in work})
    for name, label, colour, line in (("work_s", "work", TRAIN, "-"), ("wait_s", "waiting", VALIDATION, "--")):
        points = {rank: [(row["epoch"] + 1, row[name]) for row in work if row["rank"] == rank] for rank in ranks}
        most = max(ranks, key=lambda rank: sum(seconds for _, seconds in points[rank]))
        for rank in ranks:
            shown = f"{label} (most: rank {rank})" if rank == most else "_"  # matplotlib leaves "_" out of legends
            panel.plot(*zip(*points[rank], strict=True), color=colour, linestyle=line, label=shown, marker=".")
    panel.set_ylabel("seconds")
    panel.set_ylim(bottom=0)
    panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, borderaxespad=0.0)


def _draw_world(panel: Any, events: Sequence[Row], place: Callable[[Row, float], float], end: float) -> None:
    """Draw the size of the world. `place` returns the x position of an event, plus a number of seconds."""
    changes = [row for row in events if row["kind"] == "started" or (row["kind"] in KINDS and row["before"])]
    steps = [(place(row, 0.0), row["after"]) for row in changes]
    if not steps:
        return
    xs = [x for x, _ in steps] + [max(end, steps[-1][0])]
    sizes = [size for _, size in steps] + [steps[-1][1]]
    panel.step(xs, sizes, where="post", color=WORLD, linewidth=1.8)
    panel.fill_between(xs, sizes, step="post", color=WORLD, alpha=0.2)
    for kind, (label, colour, mark) in KINDS.items():
        rows = [row for row in events if row["kind"] == kind and row["before"]]
        if rows:
            points = [(place(row, 0.0), row["after"]) for row in rows]
            count = sum(abs(row["before"] - row["after"]) for row in rows) or len(rows)
            label = f"{label} ({count})"
            panel.plot(*zip(*points, strict=True), mark, color=colour, markersize=8, label=label, clip_on=False)
    spans = [(place(row, 0.0), place(row, row["pause_s"])) for row in events if row["pause_s"]]
    long = [(begin, stop) for begin, stop in spans if stop - begin > LONG_PAUSE * end]
    for number, (begin, stop) in enumerate(long):
        panel.axvspan(begin, stop, color=GREY, alpha=0.3, linewidth=0, label="" if number else "pause")
    panel.set_ylabel("workers")
    panel.set_ylim(0, max(sizes) + 0.6)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, borderaxespad=0.0)


def _epoch_axis(history: Sequence[Row]) -> Callable[[Row, float], float]:
    """Return a function that maps an event, plus a number of seconds, to the axis of epochs."""
    spans = [(row["epoch"], row["ended"] - row["seconds"], row["ended"]) for row in history if "ended" in row]

    def place(event: Row, late: float) -> float:
        time = event["time"] + late
        at = float(spans[0][0]) if spans else 0.0
        for epoch, begin, end in spans:
            if time >= end:
                at = epoch + 1.0
            elif time > begin:
                return float(epoch + (time - begin) / max(end - begin, 1e-9))
        return at

    return place


def _show_times(panel: Any, times: Sequence[tuple[int, float]]) -> None:
    if not times:
        return
    chosen = times[:: max(1, -(-len(times) // 8))]
    top = panel.secondary_xaxis("top")
    top.set_xticks([epoch for epoch, _ in chosen], [_clock(seconds) for _, seconds in chosen])
    top.tick_params(length=3, labelsize="small", colors=GREY)
    top.spines["top"].set_visible(False)
    top.set_xlabel("time since the fit began", fontsize="small", color=GREY)


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
