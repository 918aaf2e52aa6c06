"""The announcer of a job: keeps its timeline and changes, and prints a line for each change once it is explained."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from spark_elastic import clock
from spark_elastic.membership import events as seen
from spark_elastic.membership.commands import Command
from spark_elastic.membership.reasons import counted
from spark_elastic.membership.timeline import JobEnded, Record, WaitChanged, WorldStarted
from spark_elastic.membership.topology import WorkerId
from spark_elastic.redaction import redacted
from spark_elastic.reporting.event_log import EventLog, MembershipChange
from spark_elastic.reporting.job_status import StatusModel
from spark_elastic.reporting.progress import WAIT_S, ProgressModel
from spark_elastic.wire.messages import EpochEnded, LiveProgress

logger = logging.getLogger(__name__)

CAUSE_S = 0.6  # how long to wait for the cause of a loss: sockets close before exit codes and Spark's reports arrive
PAUSE_S = 1.0  # the length from which a pause is announced before it is over


class Announcer:
    """Collects the records of a job on the driver's thread, and prints a line for each change with `say`.

    Other threads may read the properties. verbose=0: no lines; 1: one for each change; 2: also each record, and what is
    waited for, at once. `on_change` is called once with each change that is not a wait, when its line is due.
    """

    def __init__(
        self,
        job: str,
        say: Callable[[str], None],
        verbose: int,
        progress: ProgressModel | None = None,
        status: StatusModel | None = None,
        on_change: Callable[[MembershipChange], None] | None = None,
    ) -> None:
        self._job = job
        self._progress = progress if progress is not None else ProgressModel()
        self._status = status
        self._say = say
        self._verbose = verbose
        self._on_change = on_change
        self._log = EventLog()
        self._timeline: list[Record] = []
        self._announced = 0  # how many of the log's changes were announced or skipped
        self._paused: list[int] = []  # indices of the changes that were announced before their pause was over
        self._cancelled = ""  # why the caller wants the job to end
        self.waiting = ""  # what is waited for, in words; empty: nothing

    @property
    def timeline(self) -> list[Record]:
        """The records so far, with times in seconds since 1970."""
        return list(self._timeline)

    @property
    def changes(self) -> list[MembershipChange]:
        """The changes so far without short waits, with times in seconds since 1970."""
        to_wall = clock.wall() - clock.monotonic()
        return [
            dataclasses.replace(change, at=change.at + to_wall)
            for change in list(self._log.changes)
            if change.kind != "waiting" or change.lasted_s is None or change.lasted_s >= WAIT_S
        ]

    def observe(self, event: seen.Event, commands: Sequence[Command], now: float) -> None:
        """Update the changes with an event and the machine's answer to it. Its records come to `announce`."""
        self._log.observe(event, commands, now)
        if isinstance(event, seen.CancelRequested):
            self._cancelled = event.why
        if isinstance(event, seen.WorkerAlive) and event.version is not None:
            self._progress.steps(event.version.steps, now)
        if self._status is not None:
            self._status.observe(event, now)

    def live(self, message: LiveProgress, now: float) -> None:
        """Show the progress of a training within an epoch."""
        self._progress.live(message, now)
        if self._status is not None:
            self._status.live(message, now)

    def epoch(self, message: EpochEnded, now: float) -> None:
        """Show the end of an epoch, and print its line unless it was printed before."""
        if self._status is not None:
            self._status.epoch(message)
        line = self._progress.epoch(message, now)
        if line is not None and self._verbose >= 1:
            self._say(line)

    def notice(self, worker: WorkerId, text: str, now: float) -> None:
        """Add a worker's message for people to the changes and to the log of this process."""
        self._log.notice(worker, text, now)
        logger.warning("%s: %s", self._job, text)

    def announce(self, record: Record) -> None:
        """Add a record to the timeline, and show it."""
        self._log.note(record)
        self._timeline.append(record.shifted(clock.wall() - clock.monotonic()))
        if self._status is not None:
            self._status.record(record, self._log.size)
        if isinstance(record, WaitChanged):
            self.waiting = record.reason
            self._progress.wait(record.wait, record.deadline, record.at)
        if isinstance(record, (JobEnded, WorldStarted)):
            self.waiting = ""
            self._progress.world(self._log.size, record.at)
        logger.info("%s: %s", self._job, record)
        if self._verbose >= 2:
            self._say(f"spark_elastic: {redacted(record)}")

    @property
    def pending(self) -> bool:
        """True while a heartbeat may complete a line: a change is not printed yet, or its pause is not over."""
        return bool(self._paused) or self._announced < len(self._log.changes)

    def print_changes(self, now: float, last: bool = False) -> float | None:
        """Print the changes that are explained, all if `last`. Return when to call again; None: no need to."""
        changes = self._log.changes
        for index in [index for index in self._paused if not changes[index].open]:
            self._paused.remove(index)
            resumed = "training starts again" if changes[index].restarted else "training goes on"
            resumed += f" with {counted(self._log.size, 'worker')}"
            self._line(", ".join([resumed, *changes[index].cost("after ")]))
        while self._announced < len(changes):
            change = changes[self._announced]
            waits_for_cause = change.kind == "lost" and change.unexplained
            due = change.at + (PAUSE_S if change.open else CAUSE_S if waits_for_cause else 0.0)
            if due > now and not last:
                return due
            if change.kind != "waiting":  # the progress bar shows waits
                known = dataclasses.replace(change, pause_s=None, steps_lost=None) if change.open else change
                # whoever waits for the job gets the reason as an exception
                failed = f"the job was cancelled ({self._cancelled})" if self._cancelled else "the job failed"
                self._line(failed if change.kind == "failed" else str(known))
                if self._on_change is not None:
                    self._on_change(dataclasses.replace(known, at=known.at + clock.wall() - clock.monotonic()))
            if change.open:
                self._paused.append(self._announced)
            self._announced += 1
        return None

    def _line(self, text: str) -> None:
        if self._verbose >= 1:
            self._say(f"spark_elastic: {text}")
