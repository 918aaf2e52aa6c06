"""The state of a job as metrics in Prometheus's text format, version 0.0.4.

docs/status_page.md lists the metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from spark_elastic.membership.states import Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: The kinds of events that are counted from 0 on, so that a rate of them begins with the first.
_KINDS = ("started", "lost", "drained", "left", "joined", "broken", "waiting", "resting", "notice")
_PREFIX = "spark_elastic_"
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]")


def metrics_text(document: Mapping[str, Any]) -> str:
    """Return the metrics of a document that `StatusModel.document` made. A value that is not known is left out."""
    text = _Text({"job": document["job"]})
    world, progress, wait = document["world"], document["progress"], document["wait"]
    events, ended = document["events"], document["ended"]

    for phase in Phase:
        text.add("phase", "1 for the present phase of the job.", document["phase"] == phase.value, phase=phase.value)
    text.add("start_time_seconds", "When the job started, in seconds since 1970.", document["started"])
    seconds = round((ended or document["now"]) - document["started"], 3)
    text.add("duration_seconds", "How long the job has run.", seconds)

    text.add("workers", "Workers of the present world that are not gone.", world["size"])
    for limit in ("num_proc", "min_num_proc", "max_num_proc"):
        text.add("workers_limit", "The settings of the number of workers.", world[limit], setting=limit)
    text.add("workers_ready", "Workers that train or wait for a world.", world["ready"])
    text.add("workers_lost_total", "Workers that were lost or removed.", world["failed"])
    text.add("world_round", "Number of the present world.", world["round"])
    text.add("world_resets_total", "Worlds that were built after the first.", world["resets"])

    text.add("waiting", "1 while the job waits for something.", wait is not None)
    text.add("wait_left_seconds", "How long the present wait may still take.", (wait or {}).get("left_s"))
    for kind in (*_KINDS, *(kind for kind in events["kinds"] if kind not in _KINDS)):
        text.add("events_total", "Events of the job by kind.", events["kinds"].get(kind, 0), kind=kind)
    text.add("steps_lost_total", "Steps that had to be computed again.", events["steps_lost"])
    text.add("restarts_total", "Times that a function without an elastic loop started again.", events["restarts"])
    text.add("pause_seconds_total", "Time without steps because of changes of the workers.", events["pause_s"])

    text.add("steps", "Optimizer steps that are applied.", progress["steps"])
    text.add("steps_per_second", "Optimizer steps a second.", progress["steps_per_s"])
    text.add("rows_per_second", "Rows a second, of all workers together.", progress["rows_per_s"])
    text.add("epochs_ended_total", "Epochs that have ended in this job.", document["epochs"]["count"])
    text.add("epochs", "Epochs that the training is to have.", progress["epochs"])
    if progress["rows_total"]:
        done = progress["rows"] / progress["rows_total"]
        text.add("epoch_progress_ratio", "Part of the present epoch's pass over the rows that is done.", done)
    for row in document["epochs"]["rows"][-1:]:
        text.add("epoch_duration_seconds", "Duration of the last epoch.", row["seconds"])
        for name, value in row["values"].items():
            shown = float("nan") if value is None else value
            text.add("epoch_value", "The loss or a metric of the last epoch.", shown, name=name)

    for name, key, about in (
        ("host_workers", "workers", "Workers on the host."),
        ("host_training", "training", "Workers on the host that train."),
        ("host_steps_per_second", "steps_per_s", "Optimizer steps a second of the host's workers, on average."),
        ("host_heartbeat_age_seconds", "heartbeat_age_s", "The longest time since the last heartbeat of a worker."),
    ):
        for host in document["hosts"]["rows"]:
            text.add(name, about, host[key], host=host["host"])
    return str(text)


class _Text:
    """Metrics as text: each name's HELP and TYPE once, before all of its samples."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._lines: list[str] = []
        self._last = ""

    def add(self, name: str, about: str, value: float | None, /, **labels: str) -> None:
        """Add a sample; a name that ends in `_total` is a counter's, others are gauges'."""
        if value is None:
            return
        name = _PREFIX + name
        if name != self._last:
            kind = "counter" if name.endswith("_total") else "gauge"
            self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            self._last = name
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**self._labels, **labels}.items())
        number = int(value) if math.isfinite(value) and value == int(value) else float(value)
        self._lines.append(f"{name}{{{shown}}} {number}")  # scrapers read Python's "nan" and "inf"

    def __str__(self) -> str:
        return "\n".join([*self._lines, ""])


def _escaped(text: str) -> str:
    """Return a label value as the format requires; characters that break lines or encodings are replaced."""
    clean = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return clean.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
