"""How long a place that failed is left alone: its slot first, then its executor, then its host."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field

from spark_elastic.errors import RepeatedCrashError
from spark_elastic.membership.topology import BEGINNING, AgentId, Place, SlotId, StateVersion, WorkerId

# A crash that always comes back: worlds in a row in which a member's process dies before one more step is applied.
#
# A row that no model survives, a library that aborts at one step, a batch that does not fit the memory: whoever is
# given
# it dies, and starting processes again does not help. Losses of machines look alike at first. They are told apart by
# three things: the agent of a process that crashed lives on, the process ended by itself (or its world had begun to
# train), and no step is applied between the deaths.

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


# Worlds that break one after another although nobody is lost: a network that lets some peers not reach others.

_PAUSES_S = (0.5, 60.0)  # where cooldown is off: without any pause, such worlds are built many times a second
_AT_LEAST = 5  # a network that was away for a moment gets this many tries, however long the steps are


class RegroupBackoff:
    """Counts worlds in a row that broke young, before any step, with every member still there."""

    def __init__(self, pauses_s: tuple[float, float] | None, young_s: float, give_up_s: float) -> None:
        """`young_s`: a world that lived longer did something; `give_up_s`: how long the trying may go on."""
        self._pauses_s = pauses_s or _PAUSES_S
        self._young_s = young_s
        self._give_up_s = give_up_s
        self._began = (0.0, BEGINNING)  # the newest world: when, and from which state
        self._member_lost = False
        self._first_at = 0.0  # when the first one of the row broke
        self.count = 0
        self.retry_at = float("-inf")
        """Not before then should the next world be built."""

    def began(self, version: StateVersion, now: float) -> None:
        self._began = (now, version)
        self._member_lost = False

    def lost(self) -> None:
        """A member is gone: that is why the world breaks, or broke."""
        self._member_lost = True
        self.count = 0
        self.retry_at = float("-inf")

    def broke(self, version: StateVersion, now: float) -> None:
        at, before = self._began
        if self._member_lost or version > before or now - at > self._young_s:
            self.count = 0
            return
        if self.count == 0:
            self._first_at = now
        self.count += 1
        shortest, longest = self._pauses_s
        if self.count > 1:  # the first time may be chance
            self.retry_at = now + min(longest, shortest * 2.0 ** min(self.count - 2, 60))

    def hopeless(self, now: float) -> bool:
        return self.count >= _AT_LEAST and now - self._first_at >= self._give_up_s


# One slot that fails says little about its executor, and one executor little about its host: each level cools down
# only from this many failures on (and from there as slowly as a slot does: shortest, twice that, and so on).
_FIRST_COOLED = {"slot": 1, "executor": 3, "host": 6}


@dataclass(frozen=True, slots=True)
class CoolingDown:
    """One place of one kind ("slot", "executor" or "host") that is to be left alone until `until`."""

    kind: str
    name: str
    failures: int
    until: float


@dataclass(slots=True)
class _History:
    failures: int
    last: float
    until: float
    """The place can be used from then on; `last` itself while there were too few failures for a pause."""


class Cooldown:
    """Failures per place, with an exponential pause after them.

    A place that goes without a failure for as long as the longest pause, counted from the end of its own last
    pause, is forgiven and starts from nothing. Failures of one executor or host that come within the shortest pause
    of one another are one failure seen several times (a dead executor takes all its workers with it).

    `range_s` is (shortest, longest) pause in seconds; None: never a pause.
    """

    def __init__(self, range_s: tuple[float, float] | None) -> None:
        self._range_s = range_s
        self._histories: dict[tuple[str, str], _History] = {}

    def failed(self, place: Place, now: float) -> list[CoolingDown]:
        """Count a failure of the place. Returns: what cools down because of it."""
        return [
            cooling
            for kind, name in (("slot", str(place.slot)), ("executor", place.executor), ("host", place.host))
            if (cooling := self._count(kind, name, now)) is not None
        ]

    def slot_failed(self, slot: SlotId, now: float) -> list[CoolingDown]:
        """Count a failure of a slot whose place is not known, or is not to blame."""
        cooling = self._count("slot", str(slot), now)
        return [] if cooling is None else [cooling]

    def ready_at(self, place: Place) -> float:
        """When the place may be used; a time in the past if it may be used now."""
        return max(
            self.slot_ready_at(place.slot), self._until("executor", place.executor), self._until("host", place.host)
        )

    def slot_ready_at(self, slot: SlotId) -> float:
        """When the slot may be launched, wherever it will run."""
        return self._until("slot", str(slot))

    def _until(self, kind: str, name: str) -> float:
        history = self._histories.get((kind, name))
        return float("-inf") if history is None else history.until

    def _count(self, kind: str, name: str, now: float) -> CoolingDown | None:
        if self._range_s is None:
            return None
        shortest, longest = self._range_s
        self._forgive(now, longest)
        history = self._histories.setdefault((kind, name), _History(0, float("-inf"), now))
        if kind != "slot" and now - history.last < shortest:
            return None
        history.failures += 1
        history.last = now
        history.until = now
        doublings = history.failures - _FIRST_COOLED[kind]
        if doublings < 0:
            return None
        # 2**1024 overflows a float; 60 doublings of a nanosecond are 36 years
        history.until = now + min(longest, shortest * 2.0 ** min(doublings, 60))
        return CoolingDown(kind, name, history.failures, history.until)

    def _forgive(self, now: float, longest: float) -> None:
        for key in [key for key, history in self._histories.items() if now >= history.until + longest]:
            del self._histories[key]
