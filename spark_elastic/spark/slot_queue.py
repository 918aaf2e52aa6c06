"""The queue of the jobs that share a Spark application: one job at a time gathers its minimum of slots.

Two jobs of three workers each on four slots: with two slots each, both would wait until their timeouts. So jobs gather
their minimum one after the other, in order of arrival. A job that has trained and fell below its minimum goes first: a
job that has not begun to train gives back the slots that it has gathered so far.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import InitVar, dataclass, replace

from spark_elastic.membership.launcher import LaunchEnd, Launcher, OnEnded
from spark_elastic.membership.reasons import LossCause, reported
from spark_elastic.membership.topology import LaunchId, SlotId

log = logging.getLogger(__name__)


class QueueState(enum.Enum):
    """The position of a job in the queue: another job gathers its workers; it gathers them; it has its minimum."""

    WAITING, GATHERING, HOLDING = range(3)


class SlotQueue:
    """The queue of the jobs of one Spark application. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[QueuedLauncher] = []
        """In order of arrival."""

    def enter(self, job: QueuedLauncher) -> None:
        """Add a job. Its `look_again` is called, without the lock, whenever the state of a job may have changed."""
        with self._lock:
            job.state = QueueState.WAITING
            self._jobs.append(job)
        self._settle()

    def count(self, job: QueuedLauncher, has_minimum: bool) -> None:
        """Record whether a job has its minimum; if it fell below it, it has to gather again."""
        with self._lock:
            if job not in self._jobs or has_minimum is (job.state is QueueState.HOLDING):
                return
            job.state = QueueState.HOLDING if has_minimum else QueueState.WAITING
            job.has_begun = True
        self._settle()

    def leave(self, job: QueuedLauncher) -> None:
        """Remove a job at its end. May be called again."""
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        self._settle()

    def is_contended(self, mine: QueuedLauncher) -> bool:
        """Return True if another job waits for its minimum."""
        with self._lock:
            return any(each.state is not QueueState.HOLDING for each in self._jobs if each is not mine)

    def gathers_before(self, mine: QueuedLauncher) -> str | None:
        """Return the name of the job that gathers now, if it is another one."""
        with self._lock:
            gathering = (each for each in self._jobs if each.state is QueueState.GATHERING)
            return next((each.job for each in gathering if each is not mine), None)

    def _settle(self) -> None:
        """Let the next job gather if none does, and notify all jobs."""
        with self._lock:
            gathering = next((each for each in self._jobs if each.state is QueueState.GATHERING), None)
            waiting = [each for each in self._jobs if each.state is QueueState.WAITING]
            urgent = next((each for each in waiting if each.has_begun), None)
            if gathering is not None and not gathering.has_begun and urgent is not None:
                gathering.state = QueueState.WAITING
                gathering = None
            if gathering is None and waiting:
                (urgent or waiting[0]).state = QueueState.GATHERING
            jobs = list(self._jobs)
        for each in jobs:
            each.look_again()


_queues: dict[str, SlotQueue] = {}
_queues_lock = threading.Lock()


def queue_of(application: str) -> SlotQueue:
    """Return the queue of the Spark application with this id; there is one for each."""
    with _queues_lock:
        return _queues.setdefault(application, SlotQueue())


@dataclass(eq=False)
class QueuedLauncher:
    """A `Launcher` that holds launches back until the queue lets the job gather, then passes them on to another one.

    While another job waits for its minimum, this job is limited to its own: further launches are held back, and
    launches beyond it that no agent has answered yet are withdrawn and held again. To the driver a slot that is held
    again is still launched; the end of the withdrawn launch is not reported.
    """

    queue: SlotQueue
    job: str
    need: int
    """The job's min_num_proc."""
    build: InitVar[Callable[[OnEnded], Launcher]]
    """Makes the launcher that does the work, from the `on_ended` that it has to call."""
    on_ended: OnEnded
    """Also called for held slots that are withdrawn."""

    def __post_init__(self, build: Callable[[OnEnded], Launcher]) -> None:
        self._lock = threading.RLock()
        self._held: set[SlotId] = set()
        self._launched: set[SlotId] = set()
        self._taken_back: dict[SlotId, LossCause | None] = {}
        """Slots whose launch is being withdrawn, to be held again; with the reason if the driver withdrew them too."""
        self._joined: set[SlotId] = set()
        self._closed = False
        self._launcher = build(self._ended)
        self._logged: str | None = None
        # --- under the queue's lock ---
        self.state: QueueState | None = None
        """None before the first launch: a job that cannot be placed yet blocks no other."""
        self.has_begun = False
        """True once the job has held its minimum: its agents may hold a training state and are not taken from it."""

    def launch(self, slot: SlotId) -> None:
        if self.state is None:
            self.queue.enter(self)
        with self._lock:
            if slot in self._held or slot in self._launched or slot in self._taken_back:
                raise ValueError(f"slot {slot} is still running; wait for its end before the next launch")
            self._held.add(slot)
        self.look_again()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._lock:
            if slot in self._taken_back:
                self._taken_back[slot] = cause
                return
            if slot in self._launched:
                self._launcher.withdraw(slot, cause)
                return
            if slot not in self._held:
                return
            self._held.remove(slot)
        self.on_ended(LaunchEnd(slot, cause))

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        with self._lock:
            if slot not in self._launched or not self._launcher.admit(slot, launch):
                return False
            self._joined.add(slot)  # from now on its launch is not taken back as one without an agent
            return True

    def agent_present(self, slot: SlotId, present: bool) -> None:
        self._launcher.agent_present(slot, present)
        with self._lock:
            if present:
                self._joined.add(slot)
            else:
                self._joined.discard(slot)
            has_minimum = len(self._joined) >= self.need
        self.queue.count(self, has_minimum)
        self.look_again()

    def gone(self) -> str | None:
        return self._launcher.gone()

    def close(self, deadline_s: float) -> None:
        with self._lock:
            self._closed = True
            held, self._held = self._held, set()
        try:
            self._launcher.close(deadline_s)
        finally:
            self.queue.leave(self)
        for slot in sorted(held):
            self.on_ended(LaunchEnd(slot, reported("the job is over")))

    def look_again(self) -> None:
        """Take back launches above the limit, and pass on held ones below it."""
        with self._lock:
            if self._closed or self.state is None:
                return
            limit = self._limit()
            not_begun = self.state is QueueState.WAITING and not self.has_begun
            kept = () if not_begun else self._joined  # their agents may hold a training state
            spare = sorted(self._launched.difference(kept))
            while len(self._launched) > limit and spare:
                slot = spare.pop()
                self._launched.remove(slot)
                self._taken_back[slot] = None
                self._launcher.withdraw(slot, reported("given back: another job waits for its minimum"))
            room = max(limit - len(self._launched), 0)
            for slot in sorted(self._held)[:room] if room else ():
                self._held.remove(slot)
                self._launched.add(slot)
                self._launcher.launch(slot)
            before = self.queue.gathers_before(self) if self._held else None
            if before is not None and before != self._logged:
                log.info("%s holds %d launches back until job %s has its workers", self.job, len(self._held), before)
            self._logged = before

    def _limit(self) -> int:
        """Return the number of slots that may be launched now."""
        if self.state is QueueState.WAITING:
            return len(self._joined) if self.has_begun else 0
        if self.queue.is_contended(self):
            return max(self.need, len(self._joined))
        return len(self._launched) + len(self._held)

    def _ended(self, end: LaunchEnd) -> None:
        slot = end.slot
        with self._lock:
            if slot in self._taken_back:
                withdrawn = self._taken_back.pop(slot)
                report = withdrawn is not None or end.outcome is not None or self._closed
                end = replace(end, cause=withdrawn or end.cause)
                if not report:
                    self._held.add(slot)
            else:
                self._launched.discard(slot)
                report = True
        if report:
            self.on_ended(end)
        self.look_again()
