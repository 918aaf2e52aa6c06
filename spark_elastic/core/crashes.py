"""A crash that always comes back: worlds in a row in which a member's process dies before one more step is applied.

A row that no model survives, a library that aborts at one step, a batch that does not fit the memory: whoever is given
it dies, and starting processes again does not help. Losses of machines look alike at first. They are told apart by
three things: the agent of a process that crashed lives on, the process ended by itself (or its world had begun to
train), and no step is applied between the deaths.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field

from spark_elastic.core.topology import AgentId, Place, WorkerId
from spark_elastic.core.version import BEGINNING, StateVersion
from spark_elastic.errors import RepeatedCrashError

EXITS_OF_OURS = frozenset({75, 76, 79})
"""Codes with which a worker ends itself because others are gone, see `task.worker` and `task.link`."""
_FROM_OUTSIDE = frozenset(
    number
    for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGSTOP", "SIGPWR")
    if (number := getattr(signal, name, None)) is not None
)
"""Signals that others send, a preemption for one; a process that crashes gets another one."""
_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a worker's process ended, as its agent saw it."""

    code: int
    """Negative: killed by that signal."""
    stderr_tail: str = ""
    oom_kills: int = 0
    """Processes that the kernel has killed for memory there while the worker ran."""
    memory: str = ""
    """What the kernel says about memory there, in words; empty: nothing of note."""


@dataclass(frozen=True, slots=True)
class Death:
    """A member's process that died while its agent lived.

    after_loop: it had said that its loop has returned. returned: its function had, and was to be called again; the
    process may just have ended as it should.
    """

    worker: WorkerId
    agent: AgentId
    place: Place
    round: int
    rank: int
    at: float
    after_loop: bool = False
    returned: bool = False


@dataclass(slots=True)
class Crashes:
    """The deaths since the last step.

    limit: worlds in a row that are too many; None: never. agent_grace_s: the loss of an agent is heard within that of
    the death of its worker, if both were killed.
    """

    limit: int | None
    agent_grace_s: float
    _at: StateVersion = BEGINNING  # the most advanced version known
    _deaths: dict[WorkerId, Death] = field(default_factory=dict)
    _exits: dict[WorkerId, ProcessExit] = field(default_factory=dict)
    _order: deque[WorkerId] = field(default_factory=deque)  # of `_exits`
    _had_begun: set[int] = field(default_factory=set)  # of the rounds of `_deaths`

    def reached(self, version: StateVersion) -> None:
        """Somebody holds that version: with a step, the row is over."""
        if version.is_steps_after(self._at):
            self._at = version
            self._deaths.clear()
            self._had_begun.clear()

    def begun(self, round: int) -> None:
        """A member of the round has its state, and has begun to train."""
        self._had_begun.add(round)
        self._had_begun.discard(round - _REMEMBERED)

    def died(self, death: Death) -> None:
        if self.limit is not None:
            self._deaths[death.worker] = death

    def agent_lost(self, agent: AgentId) -> None:
        """The place was lost, not only the process on it."""
        for worker in [worker for worker, death in self._deaths.items() if death.agent == agent]:
            del self._deaths[worker]

    def exited(self, worker: WorkerId, exit: ProcessExit) -> None:
        """Comes before or after the death is noted, which a closed connection tells first."""
        self._exits[worker] = exit
        self._order.append(worker)
        while len(self._order) > _REMEMBERED:
            self._exits.pop(self._order.popleft(), None)

    def row(self, now: float) -> list[tuple[Death, ProcessExit]]:
        """The deaths that count, oldest first."""
        known = [(death, self._exits[worker]) for worker, death in self._deaths.items() if worker in self._exits]
        return [(death, exit) for death, exit in known if self._counts(death, exit, now)]

    def may_be_a_row(self) -> bool:
        """Whether several worlds lost a member since the last step; of some it may not be known yet how."""
        return len({death.round for death in self._deaths.values()}) > 1

    def is_a_row_at_the_end(self, now: float) -> bool:
        """Whether crashes came back until nobody was left."""
        row = self.row(now)
        by_themselves = {death.round for death, exit in row if _is_crash(exit)}
        return len(by_themselves) > 1 or self.is_full(now)

    def error(self, furthest: StateVersion, now: float) -> RepeatedCrashError:
        row = self.row(now)
        last = row[-1][1]
        after_loop = any(death.after_loop for death, _ in row)  # there is no further step
        return RepeatedCrashError(
            step=furthest.steps if after_loop else furthest.steps + 1,
            after_loop=after_loop,
            worlds=_worlds(row),
            crashes=[(death.rank, death.place.host, exit.code) for death, exit in row],
            memory=next((exit.memory for _, exit in reversed(row) if exit.memory), ""),
            stderr_tail=next((exit.stderr_tail for _, exit in reversed(row) if exit.stderr_tail), last.stderr_tail),
        )

    def is_full(self, now: float) -> bool:
        return self.limit is not None and len(self._deaths) >= self.limit and _worlds(self.row(now)) >= self.limit

    def full_at(self, now: float) -> float | None:
        """When to look again, if only the loss of an agent could keep the row from being full."""
        if self.limit is None or len({death.round for death in self._deaths.values()}) < self.limit:
            return None
        due = max(death.at for death in self._deaths.values()) + self.agent_grace_s
        return due if due > now else None

    def forgive(self) -> None:
        """Begin a new row: something was done about this one."""
        self._deaths.clear()

    def _counts(self, death: Death, exit: ProcessExit, now: float) -> bool:
        if exit.code in EXITS_OF_OURS or (death.returned and exit.code == 0):
            return False
        return _is_crash(exit) or (death.round in self._had_begun and now >= death.at + self.agent_grace_s)


def _is_crash(exit: ProcessExit) -> bool:
    """Whether nobody but the process itself, or the kernel for its memory, can have ended it."""
    number = -exit.code if exit.code < 0 else exit.code - 128
    return number not in _FROM_OUTSIDE or exit.oom_kills > 0


def _worlds(row: list[tuple[Death, ProcessExit]]) -> int:
    return len({death.round for death, _ in row})
