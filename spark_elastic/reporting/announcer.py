"""What people get to hear of a job: its timeline, its changes, and a line for each once enough is known of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from spark_elastic import clock
from spark_elastic.membership import events as seen
from spark_elastic.membership.commands import Command
from spark_elastic.membership.timeline import JobEnded, PlaceCooledDown, Record, Waiting, WorldStarted
from spark_elastic.membership.topology import WorkerId
from spark_elastic.membership.wording import counted
from spark_elastic.reporting.event_log import (
    EventLog,
    MembershipChange,
    seconds_in_words,
    steps_in_words,
)
from spark_elastic.reporting.progress import WAIT_S, ProgressModel
from spark_elastic.wire.messages import EpochEnded, LiveProgress

logger = logging.getLogger(__name__)

CAUSE_S = 0.6
"""How long the cause of a loss is waited for: sockets close before an exit code or Spark's own word arrives."""
PAUSE_S = 1.0
"""A pause that takes longer is told of before it is over."""


class Announcer:
    """Collects on the driver's thread, and may be asked from any.

    say: prints one line. verbose: 0: none; 1: each change; 2: also what is waited for, at once, and every record.
    """

    def __init__(
        self, job: str, say: Callable[[str], None], verbose: int, progress: ProgressModel | None = None
    ) -> None:
        self._job = job
        self._progress = progress if progress is not None else ProgressModel()
        self._say = say
        self._verbose = verbose
        self._log = EventLog()
        self._timeline: list[Record] = []
        self._told = 0
        """Of the log's changes, how many were told or passed over."""
        self._paused: list[int] = []
        """Those that were told before their pause was over."""
        self.waiting = ""
        """What is waited for, in words."""

    @property
    def timeline(self) -> list[Record]:
        """`at` and other times in seconds since the epoch."""
        return list(self._timeline)

    @property
    def changes(self) -> list[MembershipChange]:
        """Without short waits; `at` in seconds since the epoch."""
        to_wall = clock.wall() - clock.monotonic()
        return [
            dataclasses.replace(change, at=change.at + to_wall)
            for change in list(self._log.changes)
            if change.kind != "waiting" or change.lasted_s is None or change.lasted_s >= WAIT_S
        ]

    @property
    def size(self) -> int:
        """Workers of the present world that are still there."""
        return self._log.size

    def observe(self, event: seen.Event, commands: Sequence[Command], now: float) -> None:
        """What the machine was told and what it answered; what that announces comes to `announce`."""
        self._log.observe(event, commands, now)
        if isinstance(event, seen.WorkerAlive) and event.version is not None:
            self._progress.steps(event.version.steps, now)

    def live(self, told: LiveProgress, now: float) -> None:
        self._progress.live(told, now)

    def epoch(self, told: EpochEnded, now: float) -> None:
        line = self._progress.epoch(told, now)
        if line is not None and self._verbose >= 1:
            self._say(line)

    def notice(self, worker: WorkerId, text: str, now: float) -> None:
        """Take in what a worker has to say to people."""
        self._log.notice(worker, text, now)
        logger.warning("%s: %s", self._job, text)

    def announce(self, record: Record) -> None:
        """Take a record into the timeline."""
        self._log.note(record)
        to_wall = clock.wall() - clock.monotonic()
        times = {"at": record.at + to_wall}
        if isinstance(record, Waiting) and record.deadline is not None:
            times["deadline"] = record.deadline + to_wall
        if isinstance(record, PlaceCooledDown):
            times["until"] = record.until + to_wall
        self._timeline.append(dataclasses.replace(record, **times))
        if isinstance(record, Waiting):
            self.waiting = record.reason
            self._progress.wait(record.wait, record.deadline, record.at)
        if isinstance(record, (JobEnded, WorldStarted)):
            self.waiting = ""
            self._progress.world(self._log.size, record.at)
        logger.info("%s: %s", self._job, record)
        if self._verbose >= 2:
            self._say(f"spark_elastic: {record}")

    def tell(self, now: float, last: bool = False) -> float | None:
        """Print what enough is known of. last: all that is left. Returns: when to call again; None: no need to."""
        changes = self._log.changes
        for index in [index for index in self._paused if not changes[index].open]:
            self._paused.remove(index)
            self._line(_end_of_pause(changes[index], self._log.size))
        while self._told < len(changes):
            change = changes[self._told]
            due = now if last else _due(change)
            if due > now:
                return due
            if change.kind != "waiting":  # which the bar shows, or the lines that stand for it
                told = dataclasses.replace(change, pause_s=None, steps_lost=None) if change.open else change
                self._line(str(told))
            if change.open:
                self._paused.append(self._told)
            self._told += 1
        return None

    def _line(self, text: str) -> None:
        if self._verbose >= 1:
            self._say(f"spark_elastic: {text}")


def _due(change: MembershipChange) -> float:
    """When it is told."""
    if change.open:
        return change.at + PAUSE_S
    if change.kind == "lost" and change.unexplained:
        return change.at + CAUSE_S
    return change.at


def _end_of_pause(change: MembershipChange, size: int) -> str:
    cost = [] if change.steps_lost is None else [steps_in_words(change.steps_lost)]
    after = [] if change.pause_s is None else [f"after {seconds_in_words(change.pause_s)}"]
    return ", ".join([f"training goes on with {counted(size, 'worker')}", *after, *cost])
