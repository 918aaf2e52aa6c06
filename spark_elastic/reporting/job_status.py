"""The state of a job as one JSON document: what the status page shows and `/status.json` returns.

The driver's thread feeds a `StatusModel`; the thread of the status page reads it. However many workers, epochs and
events a job has, the document stays below about 300 kB. docs/status_page.md lists its fields.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_elastic.membership import events as seen
from spark_elastic.membership import timeline
from spark_elastic.membership.states import WorkerState
from spark_elastic.membership.topology import WorkerId
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.progress import Speed, cut
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.messages import EpochEnded, LiveProgress

VERSION = 1  # version of the document. Fields may be added within a version; one that is removed or changed raises it.
MEASURE_S = 0.9  # the shortest time between two measurements of a worker's steps
MOST_EPOCHS = 400
STORED_EPOCHS = 5_000
MOST_SIZES = 400
MOST_EVENTS = 200
MOST_HOSTS = 200
MOST_WORKERS = 128
MOST_VALUES = 40  # the loss and metrics of an epoch that are shown
MOST_NAME = 200
MOST_TEXT = 1000  # characters of a name, and of a sentence, that are shown

TRAINING = WorkerState.TRAINING.value

Document = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker process as the driver knows it."""

    worker: WorkerId
    host: str
    executor: str
    rank: int | None  # its rank in the newest world; None: it is not a member
    state: str  # a name of `membership.states.WorkerState`
    blocked_s: float | None  # its wait for the others in a collective, at its last heartbeat; None: it did not wait


@dataclass(frozen=True)
class JobStatus:
    """The state of a job at one moment."""

    phase: str
    round: int  # number of the current world; 0 before the first
    size: int  # size of the current world; 0 before the first
    progress: int | None  # the most optimizer steps known to be applied
    waiting_for: str  # the reason of the current wait, in words; empty if the job waits for nothing
    ready: int = 0  # workers that wait for a world or are members of one
    succeeded: int = 0  # workers whose function has returned
    failed: int = 0  # workers that were lost or removed since the job began
    resets: int = 0  # worlds that were built after the first


@dataclass(slots=True)
class _Heartbeats:
    """What a worker's own messages say."""

    heard_at: float
    speed: Speed
    steps: int | None = None
    measured_at: float = float("-inf")


class StatusModel:
    """Collects what a job's status page shows and its timeline does not hold. Times are of the monotonic clock."""

    def __init__(self, job: str, settings: ElasticSettings, now: float) -> None:
        self._lock = threading.Lock()
        self._job = job
        self._settings = settings
        self._began = now
        self._ended: timeline.JobEnded | None = None
        self._wait: timeline.WaitChanged | None = None
        self._wait_began = now
        self._heartbeats: dict[WorkerId, _Heartbeats] = {}
        self._live: tuple[LiveProgress, Speed] | None = None
        self._epochs: list[EpochEnded] = []  # of very many a part
        self._epoch_count = 0
        self._sizes: list[tuple[float, int]] = [(now, 0)]  # the size of the world and when it changed to that

    # --- input, from the driver's thread --------------------------------------------------------------

    def observe(self, event: seen.Event, now: float) -> None:
        """Store a heartbeat. Other events come as records."""
        match event:
            case seen.WorkerAlive(worker, version) | seen.WorkerReady(worker, _, version):
                with self._lock:
                    heard = self._heartbeats.get(worker)
                    if heard is None:
                        heard = self._heartbeats[worker] = _Heartbeats(now, Speed())
                    heard.heard_at = now
                    if version is not None:
                        heard.steps = version.steps
                        if now - heard.measured_at >= MEASURE_S:  # a few milliseconds apart, one step is no rate
                            heard.measured_at = now
                            heard.speed.note(now, version.steps)

    def record(self, record: timeline.Record, size: int) -> None:
        """Store a record of the timeline. `size`: the workers of the present world that are not gone."""
        with self._lock:
            match record:
                case timeline.WorkerLeft(_, worker):
                    self._heartbeats.pop(worker, None)
                case timeline.WaitChanged():
                    if self._wait is None or self._wait.wait.kind is not record.wait.kind:
                        self._wait_began = record.at
                    self._wait = record
                case timeline.WorldStarted():
                    self._wait = None
                    for heard in self._heartbeats.values():
                        heard.speed = Speed()
                case timeline.JobEnded():
                    self._wait = None
                    self._ended = self._ended or record
            if size != self._sizes[-1][1]:
                self._sizes.append((record.at, size))

    def live(self, message: LiveProgress, now: float) -> None:
        """Store the progress within an epoch."""
        with self._lock:
            last = self._live
            if last is not None and message.epoch < last[0].epoch:
                return  # from a rank 0 that is gone
            same = last is not None and (last[0].epoch, last[0].phase) == (message.epoch, message.phase)
            speed = last[1] if last is not None and same else Speed()
            speed.note(now, message.rows)
            self._live = (message, speed)

    def epoch(self, message: EpochEnded) -> None:
        """Store the results of an epoch. A repetition, from a new rank 0, has no effect."""
        with self._lock:
            if not self._epochs or message.epoch > self._epochs[-1].epoch:
                self._epochs.append(message)
                self._epoch_count += 1
            if len(self._epochs) > 2 * STORED_EPOCHS:
                self._epochs = _thin(self._epochs, STORED_EPOCHS, _first_value)

    # --- output, from any thread ----------------------------------------------------------------------

    def document(
        self,
        status: JobStatus,
        workers: Sequence[WorkerStatus],
        changes: Sequence[MembershipChange],
        now: float,
        wall: float,
    ) -> Document:
        """Return this moment's document, of values that JSON can express. `wall` is `now` in seconds since 1970."""
        with self._lock:
            to_wall = wall - now
            settings, ended, wait = self._settings, self._ended, self._wait
            ordered = sorted(workers, key=lambda each: (each.rank is None, each.rank or 0, each.worker))
            live = self._live[0] if self._live is not None else None
            rows = [
                _worker_row(each, self._heartbeats.get(each.worker), now) | _seconds(each, live, status.size)
                for each in ordered
            ]
            sizes = _thin(self._sizes, MOST_SIZES, lambda change: change[1])
            return {
                "version": VERSION,
                "job": self._job,
                "now": _rounded(wall),
                "started": _rounded(self._began + to_wall),
                "ended": None if ended is None else _rounded(ended.at + to_wall),
                "phase": status.phase if ended is None else ended.outcome,
                "reason": "" if ended is None else cut(ended.why.partition("\n")[0], MOST_TEXT),
                "wait": wait
                and {
                    "reason": cut(wait.reason, MOST_TEXT),
                    "seconds": _rounded(now - self._wait_began),
                    "left_s": None if wait.deadline is None else _rounded(max(wait.deadline - now, 0.0)),
                },
                "progress": self._progress(status, [row["steps_per_s"] for row in rows]),
                "world": {
                    "round": status.round,
                    "size": sizes[-1][1],
                    **{name: getattr(settings, name) for name in ("num_proc", "min_num_proc", "max_num_proc")},
                    **{name: getattr(status, name) for name in ("ready", "succeeded", "failed", "resets")},
                    "history": [[_rounded(at + to_wall), size] for at, size in sizes],
                },
                "heartbeat_timeout_s": settings.heartbeat_timeout_s,
                "hosts": _hosts(rows),
                "workers": {"count": len(rows), "rows": rows if len(rows) <= MOST_WORKERS else []},
                "epochs": {
                    "count": self._epoch_count,
                    "rows": [
                        {"epoch": each.epoch, "seconds": _rounded(each.seconds), "values": _plain_values(each.values)}
                        for each in _thin(self._epochs, MOST_EPOCHS, _first_value)
                    ],
                },
                "events": _events(changes),
            }

    def _progress(self, status: JobStatus, rates: Sequence[float | None]) -> Document:
        over = self._ended is not None
        known = sorted(rate for rate in rates if rate is not None)
        made: Document = {
            "steps": status.progress,
            "steps_per_s": None if over or not known else known[len(known) // 2],
            **dict.fromkeys(("epoch", "epochs", "phase", "rows", "rows_total", "rows_per_s", "left_s")),
            "values": {},
        }
        newest = self._epochs[-1] if self._epochs else None
        if self._live is not None and (newest is None or self._live[0].epoch > newest.epoch):
            live, speed = self._live
            rate = None if over or self._wait is not None else speed.rate
            made |= {
                "epoch": live.epoch,
                "epochs": live.epochs,
                "phase": live.phase,
                "rows": live.rows,
                "rows_total": live.total,
                "rows_per_s": _rounded(rate),
                "left_s": self._left_s(live, rate) if rate else None,
                "values": _plain_values(live.values),
            }
        elif newest is not None:
            made |= {"epoch": newest.epoch, "epochs": newest.epochs, "values": _plain_values(newest.values)}
            if self._live is not None:
                total = self._live[0].total if self._live[0].phase == "train" else None
                made |= {"rows": total, "rows_total": total}
        return made

    def _left_s(self, live: LiveProgress, rate: float) -> float | None:
        """Estimate the time until the end of the last epoch: from the finished epochs, or else from this rate."""
        fraction = 1 - live.rows / live.total if live.total else 1.0
        rest = live.epochs - live.epoch - 1
        recent = [each.seconds for each in self._epochs[-5:]]
        if recent:
            share = fraction if live.phase == "train" else 0.0
            return _rounded((share + rest) * sum(recent) / len(recent))
        return _rounded((fraction + rest) * live.total / rate) if live.phase == "train" else None


def _worker_row(worker: WorkerStatus, heard: _Heartbeats | None, now: float) -> Document:
    rate = None
    if heard is not None and worker.state == TRAINING and now - heard.heard_at <= Speed.WINDOW_S:
        rate = heard.speed.rate
    return {
        "worker": worker.worker,
        "rank": worker.rank,
        "host": cut(worker.host, MOST_NAME),
        "executor": cut(worker.executor, MOST_NAME),
        "state": worker.state,
        "steps": heard and heard.steps,
        "steps_per_s": _rounded(rate),
        "heartbeat_age_s": None if heard is None else _rounded(now - heard.heard_at),
        "blocked_s": _rounded(worker.blocked_s),
    }


def _seconds(worker: WorkerStatus, live: LiveProgress | None, size: int) -> Document:
    """Return how long a worker works in a step, and waits for the others; None: unknown."""
    if live is None or worker.state != TRAINING or worker.rank is None or len(live.worked_s) != size:
        return {"work_s": None, "wait_s": None}
    work_s = live.worked_s[worker.rank]
    return {"work_s": round(work_s, 6), "wait_s": round(max(0.0, live.step_s - work_s), 6)}


def _hosts(workers: Sequence[Document]) -> Document:
    by_host: dict[str, list[Document]] = {}
    for row in workers:
        by_host.setdefault(row["host"], []).append(row)
    rows = []
    for host, here in by_host.items():
        known = {
            field: [row[field] for row in here if row[field] is not None]
            for field in ("rank", "steps_per_s", "heartbeat_age_s", "blocked_s")
        }
        states = Counter(row["state"] for row in here)
        rates = known["steps_per_s"]
        rows.append(
            {
                "host": host,
                "first_rank": min(known["rank"], default=None),
                "executors": len({row["executor"] for row in here}),
                "workers": len(here),
                "training": states[TRAINING],
                "states": dict(states),
                "steps_per_s": _rounded(sum(rates) / len(rates)) if rates else None,
                "heartbeat_age_s": max(known["heartbeat_age_s"], default=None),
                "blocked_s": max(known["blocked_s"], default=None),
            }
        )
    rows.sort(key=lambda row: (row["first_rank"] is None, row["first_rank"] or 0, row["host"]))
    return {"count": len(rows), "rows": rows[:MOST_HOSTS]}


def _events(changes: Sequence[MembershipChange]) -> Document:
    restarts = sum(change.restarted for change in changes)
    return {
        "count": len(changes),
        "kinds": dict(Counter(change.kind for change in changes)),
        "steps_lost": None if restarts else sum(change.steps_lost or 0 for change in changes),
        "restarts": restarts,
        "pause_s": _rounded(sum(change.pause_s or 0.0 for change in changes)),
        "rows": [
            {
                "time": _rounded(change.at),
                "kind": change.kind,
                "text": cut(str(change), MOST_TEXT),
                "before": change.before,
                "after": change.after,
                "pause_s": _rounded(change.pause_s),
                "steps_lost": change.steps_lost,
                "lasted_s": _rounded(change.lasted_s),
            }
            for change in changes[-MOST_EVENTS:]
        ],
    }


def _first_value(message: EpochEnded) -> float:
    value = next(iter(message.values.values()), 0.0)
    return value if math.isfinite(value) else math.inf


def _thin(all_of: Sequence[T], most: int, key: Callable[[T], float]) -> list[T]:
    """Return at most `most`: the first, the last, and of each stretch between them the smallest and the largest."""
    if len(all_of) <= most:
        return list(all_of)
    stretches, inner = most // 2 - 1, len(all_of) - 2
    kept = {0, len(all_of) - 1}
    for number in range(stretches):
        stretch = range(1 + number * inner // stretches, 1 + (number + 1) * inner // stretches)
        by_key = sorted(stretch, key=lambda index: key(all_of[index]))  # of equal ones the first and the last
        kept |= {by_key[0], by_key[-1]}
    return [all_of[index] for index in sorted(kept)]


def _plain_values(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return values that JSON can express: None for NaN and infinity."""
    few = list(values.items())[:MOST_VALUES]
    return {cut(name, MOST_NAME): float(f"{value:.6g}") if math.isfinite(value) else None for name, value in few}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
