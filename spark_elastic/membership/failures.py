"""Repeated failures: pauses for slots, executors, hosts and worlds, and the point at which a job fails.

`Cooldown` and `RegroupBackoff` make pauses. `CrashLoopDetector` finds crashes that would come back after any pause,
`EarlyLeaves` functions that make unequal steps.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_elastic.errors import RepeatedCrashError
from spark_elastic.membership.events import WorkerLost
from spark_elastic.membership.registry import Worker
from spark_elastic.membership.timeline import CooldownStarted
from spark_elastic.membership.topology import BEGINNING, AgentId, Place, StateVersion, WorkerId
from spark_elastic.settings import ElasticSettings

DEFAULT_PAUSES_S = (0.5, 60.0)  # shortest and longest pause where a pause is needed although cooldown is off
_FIRST_COOLED = {"slot": 1, "executor": 3, "host": 6}  # the failures of one kind from which on it cools down


def _pause_s(range_s: tuple[float, float], doublings: int) -> float:
    shortest, longest = range_s
    # 2**1024 overflows a float; 60 doublings of a nanosecond are 36 years
    return min(longest, shortest * 2.0 ** min(doublings, 60))


@dataclass(slots=True)
class _History:
    failures: int
    last: float
    until: float  # when it may be used; the time of the last failure while there were too few for a pause


class Cooldown:
    """Counts failures of slots, executors and hosts, and makes each wait for an exponentially growing pause.

    `range_s` has the shortest and longest pause in seconds; None: never a pause. The count starts again at
    zero once it had no failure for as long as the longest pause, counted from the end of its last pause. Failures of
    one executor or host within the shortest pause of one another count as one: a dead executor takes all its workers
    with it.
    """

    def __init__(self, range_s: tuple[float, float] | None) -> None:
        self._range_s = range_s
        self._histories: dict[tuple[str, str], _History] = {}
        self._forget_from = 64  # the number of histories at which the old ones among them are looked for

    def failed(self, place: Place, now: float) -> list[CooldownStarted]:
        """Count a failure of the slot, executor and host. Returns a record of each that has to pause because of it."""
        levels = (("slot", str(place.slot)), ("executor", place.executor), ("host", place.host))
        return [record for kind, name in levels for record in self.count(kind, name, now)]

    def ready_at(self, place: Place) -> float:
        """Return the time from which the slot may be used; it is in the past if it may be used now."""
        slot = self.until("slot", str(place.slot))
        return max(slot, self.until("executor", place.executor), self.until("host", place.host))

    def until(self, kind: str, name: str) -> float:
        """Return the time from which the "slot", "executor" or "host" of that name may be used."""
        history = self._histories.get((kind, name))
        return float("-inf") if history is None else history.until

    def count(self, kind: str, name: str, now: float) -> list[CooldownStarted]:
        """Count a failure of one slot, executor or host. Returns as `failed`."""
        if self._range_s is None:
            return []
        shortest, longest = self._range_s
        if len(self._histories) >= self._forget_from:
            self._histories = {key: each for key, each in self._histories.items() if now < each.until + longest}
            self._forget_from = 64 + 2 * len(self._histories)
        history = self._histories.get((kind, name))
        if history is None or now >= history.until + longest:
            history = self._histories[kind, name] = _History(0, float("-inf"), now)
        if kind != "slot" and now - history.last < shortest:
            return []
        history.failures += 1
        history.last = history.until = now
        doublings = history.failures - _FIRST_COOLED[kind]
        if doublings < 0:
            return []
        history.until = now + _pause_s(self._range_s, doublings)
        return [CooldownStarted(now, kind, name, history.failures, history.until)]


_FEWEST_TRIES = 5  # this many worlds are tried before the job is given up, even if that takes longer than the timeout


class RegroupBackoff:
    """Makes a pause before the next world when consecutive worlds broke early with every member still alive.

    A world broke early if it applied no step and lasted at most `stall_timeout`. The usual cause is a network in which
    some peers cannot reach others. Without a pause, such worlds would be built many times a second. The job is given up
    once at least `_FEWEST_TRIES` worlds in a row broke early, over at least `elastic_timeout`.
    """

    def __init__(self, settings: ElasticSettings) -> None:
        self._settings = settings
        self._began = (0.0, BEGINNING)  # the newest world: when, and from which state
        self.member_is_lost = False
        self._first_at = 0.0  # when the first of the consecutive worlds broke
        self.count = 0
        self.retry_at = float("-inf")  # when the next world may be built

    def world_began(self, version: StateVersion, now: float) -> None:
        """Record that a world was published."""
        self._began = (now, version)
        self.member_is_lost = False

    def member_lost(self) -> None:
        """Record a loss, which explains why the world breaks, and start counting at zero again."""
        self.member_is_lost = True
        self.count = 0
        self.retry_at = float("-inf")

    def world_broke(self, version: StateVersion, now: float) -> None:
        """Count a broken world if it broke early and no loss explains it."""
        began_at, before = self._began
        if self.member_is_lost or version > before or now - began_at > self._settings.stall_timeout_s:
            self.count = 0
            return
        if self.count == 0:
            self._first_at = now
        self.count += 1
        if self.count > 1:  # the first time may be chance
            self.retry_at = now + _pause_s(self._settings.cooldown_range_s or DEFAULT_PAUSES_S, self.count - 2)

    def is_hopeless(self, now: float) -> bool:
        """Return True if worlds broke early often enough, and for long enough, to give the job up."""
        return self.count >= _FEWEST_TRIES and now - self._first_at >= self._settings.elastic_timeout_s


REPORT_GRACE_S = 2.0
"""How long to wait for an agent's report of an exit, or for the loss of an agent that was killed with its worker. The
channel of a dying process closes before its agent has read the end of its stderr."""
EXIT_RAISED = 1  # of a worker whose function raised, see `task.main`
EXITS_OF_OURS = frozenset({75, 76, 79})  # a worker ends itself with these because others are gone, see `task.main`
_NAMES_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGSTOP", "SIGPWR")
_FROM_OUTSIDE = {getattr(signal, name, None) for name in _NAMES_FROM_OUTSIDE}  # not all systems have all of them
"""Signals that other processes send, a preemption for example; a crash raises a different one."""
_REMEMBERED = 100


@dataclass(slots=True)
class CrashLoopDetector:
    """Finds crashes that end one world after another, although each was built with new processes.

    Examples are a row that no model can process, a library that aborts at one step, and a batch that does not fit into
    the memory. Losses of machines look alike at first. Three things tell them apart: the agent of a process that
    crashed stays connected, the process ended by itself (or its world had begun to train), and no step is applied
    between the deaths.

    Attributes:
        limit: number of consecutive worlds with a crash at which the job, or the host, is given up; None: never.
    """

    limit: int | None
    _version: StateVersion = BEGINNING  # the most advanced version that any worker reported
    #: Members whose process died after the last applied step, with the time, while their agents were connected.
    _deaths: dict[WorkerId, tuple[Worker, float]] = field(default_factory=dict)
    #: The newest exits that agents reported, oldest first.
    exits: dict[WorkerId, WorkerLost] = field(default_factory=dict)
    _rounds_that_trained: set[int] = field(default_factory=set)

    def note_version(self, version: StateVersion) -> None:
        """Record that a worker holds this version. Deaths before a new step are forgotten."""
        if version.is_steps_after(self._version):
            self._version = version
            self.reset()
            self._rounds_that_trained.clear()

    def note_training(self, round: int) -> None:
        """Record that a member of the round holds the state and has begun to train."""
        self._rounds_that_trained.add(round)
        self._rounds_that_trained.discard(round - _REMEMBERED)

    def note_death(self, member: Worker, now: float) -> None:
        """Record that a member's process died while its agent was connected."""
        if self.limit is not None and member.id not in self._deaths:
            self._deaths[member.id] = (member, now)

    def forget_agent(self, agent: AgentId) -> None:
        """Drop the deaths under a lost agent, because not only the processes were lost."""
        self._deaths = {id: death for id, death in self._deaths.items() if death[0].agent.id != agent}

    def note_exit(self, exit: WorkerLost) -> None:
        """Record how a process ended, before or after its death: a closed connection is often heard first."""
        self.exits[exit.worker] = exit
        while len(self.exits) > _REMEMBERED:
            del self.exits[next(iter(self.exits))]

    def crashes(self, now: float) -> list[tuple[Worker, WorkerLost]]:
        """Return the members whose deaths count as crashes, each with its exit, oldest first."""
        known = [(*death, self.exits[id]) for id, death in self._deaths.items() if id in self.exits]
        return [(member, exit) for member, died_at, exit in known if self._counts(member, died_at, exit, now)]

    def is_a_loop_at_the_end(self, now: float) -> bool:
        """Return True if crashes came back until no member was left, even if they are fewer than the limit."""
        ended_by_themselves = (member for member, exit in self.crashes(now) if _is_crash(exit))
        return _worlds(ended_by_themselves) > 1 or self.limit_reached(now)

    def limit_reached(self, now: float) -> bool:
        """Return True if `limit` consecutive worlds had a crash."""
        if self.limit is None or self.worlds_with_deaths() < self.limit:
            return False
        return _worlds(member for member, _ in self.crashes(now)) >= self.limit

    def verdict_due_at(self, now: float) -> float | None:
        """Return when to check the limit again if no further event comes; None: it cannot be reached then."""
        if self.limit is None or self.worlds_with_deaths() < self.limit:
            return None
        due = max(died_at for _, died_at in self._deaths.values()) + REPORT_GRACE_S
        return due if due > now else None

    def reset(self) -> None:
        """Forget the deaths so far, because a step was applied or their cause was dealt with."""
        self._deaths.clear()

    def error(self, furthest: StateVersion | None, now: float) -> RepeatedCrashError:
        """Return the error for the crashes so far. `furthest`: None if workers report no steps."""
        crashes = self.crashes(now)
        after_loop = any(member.after_loop for member, _ in crashes)  # there is no further step
        return RepeatedCrashError(
            step=None if furthest is None else furthest.steps if after_loop else furthest.steps + 1,
            after_loop=after_loop,
            worlds=_worlds(member for member, _ in crashes),
            crashes=tuple((member.rank or 0, member.place.host, exit.exit_code or 0) for member, exit in crashes),
            memory=next((exit.memory for _, exit in reversed(crashes) if exit.memory), ""),
            stderr_tail=next((exit.stderr_tail for _, exit in reversed(crashes) if exit.stderr_tail), ""),
        )

    def worlds_with_deaths(self) -> int:
        """Count the worlds that lost a member since the last applied step, whatever the cause."""
        return _worlds(member for member, _ in self._deaths.values())

    def _counts(self, member: Worker, died_at: float, exit: WorkerLost, now: float) -> bool:
        returned = member.rerun_round == member.round  # and was to run again: the process may have ended as it should
        if exit.exit_code in EXITS_OF_OURS or (returned and exit.exit_code == 0):
            return False
        trained = member.round in self._rounds_that_trained
        return _is_crash(exit) or (trained and now >= died_at + REPORT_GRACE_S)


def _is_crash(exit: WorkerLost) -> bool:
    """Return True if the process ended by itself, or the kernel killed it for its memory: no other process did."""
    code = exit.exit_code or 0
    number = -code if code < 0 else code - 128
    return number not in _FROM_OUTSIDE or exit.oom_kills > 0


def _worlds(members: Iterable[Worker]) -> int:
    return len({member.round for member in members})


class EarlyLeaves:
    """Finds members that leave the collectives of others in one world after another; once may be chance."""

    def __init__(self) -> None:
        #: The last round in which some waited for members that had left, and True if a failed collective was its sign.
        self._last = (0, False)

    def came_back(self, round: int, inferred: bool) -> bool:
        """Record that members left early in this round; return whether others had in an earlier one."""
        if 0 < self._last[0] < round:
            return True
        self._last = (round, inferred)
        return False

    def member_lost(self, round: int) -> None:
        """Forget what was concluded from a failed collective of this round, which the loss explains too."""
        if self._last == (round, True):
            self._last = (0, False)
