"""The state of a job as metrics in Prometheus's text format, version 0.0.4.

docs/status_page.md lists the metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spark_elastic.membership.states import Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KINDS = ("started", "lost", "drained", "left", "joined", "broken", "waiting", "resting", "notice")
"""The kinds of events that are counted from 0 on, so that a rate of them begins with the first."""
_PREFIX = "spark_elastic_"
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]")


def metrics_text(document: Mapping[str, Any]) -> str:
    """Return the metrics of a document that `StatusModel.document` made. A value that is not known is left out."""
    text = _Text({"job": document["job"]})
    world, progress, wait = document["world"], document["progress"], document["wait"]
    events, ended = document["events"], document["ended"]

    for phase in Phase:
        text.gauge("phase", "1 for the present phase of the job.", document["phase"] == phase.value, phase=phase.value)
    text.gauge("start_time_seconds", "When the job started, in seconds since 1970.", document["started"])
    seconds = round((ended or document["now"]) - document["started"], 3)
    text.gauge("duration_seconds", "How long the job has run.", seconds)

    text.gauge("workers", "Workers of the present world that are not gone.", world["size"])
    for limit in ("num_proc", "min_num_proc", "max_num_proc"):
        text.gauge("workers_limit", "The settings of the number of workers.", world[limit], setting=limit)
    text.gauge("workers_ready", "Workers that train or wait for a world.", world["ready"])
    text.counter("workers_lost_total", "Workers that were lost or removed.", world["failed"])
    text.gauge("world_round", "Number of the present world.", world["round"])
    text.counter("world_resets_total", "Worlds that were built after the first.", world["resets"])

    text.gauge("waiting", "1 while the job waits for something.", wait is not None)
    text.gauge("wait_left_seconds", "How long the present wait may still take.", (wait or {}).get("left_s"))
    for kind in (*_KINDS, *(kind for kind in events["kinds"] if kind not in _KINDS)):
        text.counter("events_total", "Events of the job by kind.", events["kinds"].get(kind, 0), kind=kind)
    text.counter("steps_lost_total", "Steps that had to be computed again.", events["steps_lost"])
    text.counter("restarts_total", "Times that a function without an elastic loop started again.", events["restarts"])
    text.counter("pause_seconds_total", "Time without steps because of changes of the workers.", events["pause_s"])

    text.gauge("steps", "Optimizer steps that are applied.", progress["steps"])
    text.gauge("steps_per_second", "Optimizer steps a second.", progress["steps_per_s"])
    text.gauge("rows_per_second", "Rows a second, of all workers together.", progress["rows_per_s"])
    text.counter("epochs_ended_total", "Epochs that have ended in this job.", document["epochs"]["count"])
    text.gauge("epochs", "Epochs that the training is to have.", progress["epochs"])
    if progress["rows_total"]:
        done = progress["rows"] / progress["rows_total"]
        text.gauge("epoch_progress_ratio", "Part of the present epoch's pass over the rows that is done.", done)
    last = document["epochs"]["rows"][-1:]
    for row in last:
        text.gauge("epoch_duration_seconds", "Duration of the last epoch.", row["seconds"])
    for row in last:
        for name, value in row["values"].items():
            shown = float("nan") if value is None else value
            text.gauge("epoch_value", "The loss or a metric of the last epoch.", shown, name=name)

    for key, about in (
        ("workers", "Workers on the host."),
        ("training", "Workers on the host that train."),
        ("steps_per_s", "Optimizer steps a second of the host's workers, on average."),
        ("heartbeat_age_s", "Time since the oldest of the newest heartbeats of the host's workers."),
    ):
        name = "host_" + key.replace("_per_s", "_per_second").replace("_age_s", "_age_seconds")
        for host in document["hosts"]["rows"]:
            text.gauge(name, about, host[key], host=host["host"])
    return str(text)


class _Text:
    """Metrics as text: each name's HELP and TYPE once, before all of its samples."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._lines: list[str] = []
        self._last = ""

    def gauge(self, name: str, about: str, value: float | None, /, **labels: str) -> None:
        self._add("gauge", name, about, value, labels)

    def counter(self, name: str, about: str, value: float | None, /, **labels: str) -> None:
        self._add("counter", name, about, value, labels)

    def _add(self, kind: str, name: str, about: str, value: float | None, labels: dict[str, str]) -> None:
        if value is None:
            return
        name = _PREFIX + name
        if name != self._last:
            self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            self._last = name
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**self._labels, **labels}.items())
        self._lines.append(f"{name}{{{shown}}} {_number(value)}")

    def __str__(self) -> str:
        return "\n".join([*self._lines, ""])


def _escaped(text: str) -> str:
    """Return a label value as the format requires; characters that break lines or encodings are replaced."""
    clean = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return clean.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
