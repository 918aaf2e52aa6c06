"""Crashes that come back: of members in one world after another, and of processes before any worker was ready.

A row that no model survives, a library that aborts at one step, a batch that does not fit into the memory: whoever is
given it dies, and a new process does not help. Losses of machines look alike at first. Three things tell them apart:
the agent of a process that crashed lives on, the process ended by itself (or its world had begun to train), and no step
is applied between the deaths.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from spark_elastic.errors import RepeatedCrashError, WorkerStartError
from spark_elastic.membership.reasons import LossCause
from spark_elastic.membership.topology import BEGINNING, AgentId, Place, StateVersion, WorkerId
from spark_elastic.membership.wording import loss_in_words

REPORT_GRACE_S = 2.0
"""The channel of a dying process closes before its agent has read the end of its stderr."""
EXITS_OF_OURS = frozenset({75, 76, 79})
"""Codes with which a worker ends itself because others are gone, see `task.main` and `task.driver_client`."""
_FROM_OUTSIDE = frozenset(
    number
    for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGSTOP", "SIGPWR")
    if (number := getattr(signal, name, None)) is not None
)
"""Signals that other processes send, a preemption for example; a crash raises a different one."""
_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a worker's process ended, as its agent saw it."""

    code: int
    """Negative: killed by that signal."""
    stderr_tail: str = ""
    oom_kills: int = 0
    """Processes that the kernel killed for memory there while the worker ran."""
    memory: str = ""
    """The kernel's account of memory there; empty: nothing of note."""


@dataclass(frozen=True, slots=True)
class Death:
    """A member's process that died while its agent lived."""

    worker: WorkerId
    agent: AgentId
    place: Place
    round: int
    rank: int
    at: float
    after_loop: bool = False
    """The member had said that its elastic loop has returned."""
    returned: bool = False
    """Its function had returned and was to be called again: the process may have ended as it should."""


@dataclass(slots=True)
class CrashLoopDetector:
    """The deaths of members since the last applied step.

    Attributes:
        limit: number of consecutive worlds with a crash at which the job, or the host, is given up; None: never.
        agent_grace_s: if a worker and its agent were killed together, the loss of the agent is heard within this time.
    """

    limit: int | None
    agent_grace_s: float
    #: The most advanced version that any worker reported.
    _version: StateVersion = BEGINNING
    _deaths: dict[WorkerId, Death] = field(default_factory=dict)
    #: The newest exits, oldest first.
    _exits: dict[WorkerId, ProcessExit] = field(default_factory=dict)
    _rounds_that_trained: set[int] = field(default_factory=set)

    def note_version(self, version: StateVersion) -> None:
        """Take in that a worker holds this version. A new step ends the series."""
        if version.is_steps_after(self._version):
            self._version = version
            self._deaths.clear()
            self._rounds_that_trained.clear()

    def note_training(self, round: int) -> None:
        """Take in that a member of the round holds the state and has begun to train."""
        self._rounds_that_trained.add(round)
        self._rounds_that_trained.discard(round - _REMEMBERED)

    def note_death(self, death: Death) -> None:
        """Take in the death of a member."""
        if self.limit is not None:
            self._deaths[death.worker] = death

    def forget_agent(self, agent: AgentId) -> None:
        """Drop the deaths on a lost agent: the machine was lost, not only the process."""
        for worker in [worker for worker, death in self._deaths.items() if death.agent == agent]:
            del self._deaths[worker]

    def note_exit(self, worker: WorkerId, exit: ProcessExit) -> None:
        """Take in how a process ended, before or after its death: a closed connection is often heard first."""
        self._exits[worker] = exit
        while len(self._exits) > _REMEMBERED:
            del self._exits[next(iter(self._exits))]

    def crashes(self, now: float) -> list[tuple[Death, ProcessExit]]:
        """Return the deaths that count as crashes, oldest first."""
        known = [(death, self._exits[worker]) for worker, death in self._deaths.items() if worker in self._exits]
        return [(death, exit) for death, exit in known if self._counts(death, exit, now)]

    def may_be_a_loop(self) -> bool:
        """Return True if several worlds lost a member since the last step, whatever the cause."""
        return len({death.round for death in self._deaths.values()}) > 1

    def is_a_loop_at_the_end(self, now: float) -> bool:
        """Return True if crashes came back until no member was left, even if they are fewer than the limit."""
        by_themselves = {death.round for death, exit in self.crashes(now) if _is_crash(exit)}
        return len(by_themselves) > 1 or self.limit_reached(now)

    def limit_reached(self, now: float) -> bool:
        """Return True if `limit` consecutive worlds had a crash."""
        return self.limit is not None and len(self._deaths) >= self.limit and _worlds(self.crashes(now)) >= self.limit

    def verdict_due_at(self, now: float) -> float | None:
        """Return when the limit may be reached although no further event comes; None: it will not be."""
        if self.limit is None or len({death.round for death in self._deaths.values()}) < self.limit:
            return None
        due = max(death.at for death in self._deaths.values()) + self.agent_grace_s
        return due if due > now else None

    def reset(self) -> None:
        """Begin a new series, because the cause of this one was dealt with."""
        self._deaths.clear()

    def error(self, furthest: StateVersion, now: float) -> RepeatedCrashError:
        """Return the error that the job fails with."""
        crashes = self.crashes(now)
        after_loop = any(death.after_loop for death, _ in crashes)  # there is no further step
        return RepeatedCrashError(
            step=furthest.steps if after_loop else furthest.steps + 1,
            after_loop=after_loop,
            worlds=_worlds(crashes),
            crashes=[(death.rank, death.place.host, exit.code) for death, exit in crashes],
            memory=next((exit.memory for _, exit in reversed(crashes) if exit.memory), ""),
            stderr_tail=next((exit.stderr_tail for _, exit in reversed(crashes) if exit.stderr_tail), ""),
        )

    def _counts(self, death: Death, exit: ProcessExit, now: float) -> bool:
        if exit.code in EXITS_OF_OURS or (death.returned and exit.code == 0):
            return False
        trained = death.round in self._rounds_that_trained
        return _is_crash(exit) or (trained and now >= death.at + self.agent_grace_s)


def _is_crash(exit: ProcessExit) -> bool:
    """Return True if only the process itself, or the kernel for its memory, can have ended it."""
    number = -exit.code if exit.code < 0 else exit.code - 128
    return number not in _FROM_OUTSIDE or exit.oom_kills > 0


def _worlds(crashes: list[tuple[Death, ProcessExit]]) -> int:
    return len({death.round for death, _ in crashes})


@dataclass(slots=True)
class BootFailures:
    """Processes that exited before any worker of the job was ever ready.

    From the first ready worker on, an exit is a failure of its slot, not of the way in which workers are started.
    """

    limit: int
    any_ready: bool = False
    count: int = 0
    #: The newest failure: worker, cause, the end of its stderr.
    _last: tuple[WorkerId, LossCause, str] | None = None

    @property
    def limit_reached(self) -> bool:
        """True if the job is to be given up."""
        return not self.any_ready and self.count >= self.limit

    @property
    def is_explained(self) -> bool:
        """True if the exit code or the stderr of the newest failure is known, not only that its channel closed."""
        return self._last is not None and (self._last[1].code is not None or bool(self._last[2]))

    def note_ready(self) -> None:
        """Take in that a worker came up."""
        self.any_ready = True

    def add(self, worker: WorkerId, cause: LossCause, stderr_tail: str) -> None:
        """Count a process that exited."""
        if not self.any_ready:
            self.count += 1
            self._last = worker, cause, stderr_tail

    def explain(self, worker: WorkerId, cause: LossCause, stderr_tail: str) -> bool:
        """Take in an agent's report of an exit. Returns True if it is about the newest failure."""
        if self._last is None or self._last[0] != worker:
            return False
        self._last = worker, cause, stderr_tail
        return True

    def error(self) -> WorkerStartError:
        """Return the error that the job fails with."""
        assert self._last is not None
        _, cause, stderr_tail = self._last
        return WorkerStartError(attempts=self.count, reason=loss_in_words(cause), stderr_tail=stderr_tail)
