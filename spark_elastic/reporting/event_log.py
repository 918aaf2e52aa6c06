"""What became of the world, change by change, in the words that people get: who, why, how many, how long, what it cost.

Made of the same events and commands as the membership machine's own; it decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from spark_elastic.membership import events as seen
from spark_elastic.membership.commands import Command, PublishWorld
from spark_elastic.membership.timeline import (
    JobEnded,
    PlaceCooledDown,
    Record,
    Waiting,
    WorkerLeft,
    WorldBroken,
    WorldStarted,
)
from spark_elastic.membership.topology import BEGINNING, Place, StateVersion, WorkerId, World

LOCAL = ("driver", "local-")
"""How the names of executors begin that are none: of local mode, and of plain processes."""
MOST_NOTICES = 200
WORTH_A_WORD_S = 5.0
"""A place that rests for less is back before anybody could miss it."""
LATE_S = 15.0
"""How long after a loss Spark's own word about an executor still explains it."""
_VAGUE = re.compile(r"connection|channel|no longer lists|process died|[Ww]orker lost|unreachable|broke the protocol")
"""Reasons that tell how a loss was noticed and not what it was; a better one often comes a moment later."""
_PREFIXES = re.compile(r"^(?:its agent is lost: |its task ended: |executor \S+ (?:is|was) lost: )+")
_EXIT = re.compile(r"(?:[Ee]xited with(?: code)?|exit code|Exit status:?) ?(-?\d+)")
_SIGNAL = re.compile(r"killed by (?:signal |SIG)(\w+)")
_AGENT_KILLED = "its agent was killed"
_SIGNALS = {"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "SEGV": 11, "TERM": 15}


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """One thing that happened to the world.

    at: when it began, on the clock of the one who was told. kind: "started", "lost", "drained", "joined", "broken",
    "waiting", "resting", "notice", "finished" or "failed". who: whom it happened to, or who has something to say, in
    words; "" for the job as a whole. before, after: workers. pause_s: until the first step after it was done, as far as
    that is told, or else until the new world was formed; None: not yet known, or no pause. steps_lost: applied steps
    that have to be done again; None as above.
    """

    at: float
    kind: str
    who: str
    reason: str
    before: int
    after: int
    pause_s: float | None = None
    steps_lost: int | None = None
    open: bool = False
    """The pause is not over."""
    lasted_s: float | None = None
    """Of a wait that is over."""

    def __str__(self) -> str:
        cause = f" ({self.reason})" if self.reason else ""
        match self.kind:
            case "started":
                return f"training starts with {workers_in_words(self.after)}"
            case "waiting":
                return self.reason
            case "resting":
                return f"{self.who} {self.reason}"
            case "notice":
                return f"{self.who}: {self.reason}"
            case "finished" | "failed":
                return f"the job {self.kind}: {self.reason}"
            case "broken":
                sizes = workers_in_words(self.after)
            case _ if self.before == self.after:
                sizes = f"still {workers_in_words(self.after)}"
            case _:
                sizes = f"{self.before} -> {workers_in_words(self.after)}"
        return f"{self.who} {self.kind}{cause}: {', '.join([sizes, *self._cost()])}"

    def _cost(self) -> list[str]:
        return [
            *([] if self.pause_s is None else [seconds_in_words(self.pause_s)]),
            *([] if self.steps_lost is None else [steps_in_words(self.steps_lost)]),
        ]


@dataclass(slots=True)
class _Departure:
    """A worker that is gone. whole: its executor is gone with it."""

    record: WorkerLeft
    reason: str
    whole: bool

    @property
    def name(self) -> str:
        place = self.record.place
        if self.whole and not place.executor.startswith(LOCAL):
            return f"executor {place.executor}"
        where = place.host if place.executor.startswith(LOCAL) else f"executor {place.executor}"
        return f"a starting worker on {where}" if self.record.rank is None else f"rank {self.record.rank} on {where}"


class EventLog:
    """All changes of a job, oldest first. Fed with what the machine was told and with what it answered."""

    def __init__(self) -> None:
        self._changes: list[MembershipChange] = []
        self._world: World | None = None
        self._next: World | None = None
        self._gone: set[WorkerId] = set()
        """Of the present world's members."""
        self._open: list[int] = []
        """Indices of changes that wait for the world after them."""
        self._departures: dict[int, list[_Departure]] = {}
        """By the index of their change."""
        self._broken: WorldBroken | None = None
        self._waits: int | None = None
        """The index of the wait that is not over."""
        self._furthest = BEGINNING
        self._notices = 0
        self._first: tuple[float, StateVersion] | None = None
        """Until the newest world has done a step: when the pause began, and the state that it starts from."""
        self._paused = 0
        """The index of the change whose pause that is."""

    @property
    def changes(self) -> Sequence[MembershipChange]:
        """Grows at the end; the newest may be replaced as more is known of them."""
        return self._changes

    @property
    def size(self) -> int:
        return 0 if self._world is None else self._world.size - len(self._gone)

    @property
    def world(self) -> World | None:
        """The newest that has started."""
        return self._world

    def observe(self, event: seen.Event, commands: Iterable[Command], now: float) -> None:
        """Take in one event and the machine's answer to it; what that announces comes to `note`."""
        match event:
            case seen.WorkerAlive(_, version) | seen.WorkerReady(_, _, version):
                version = version or BEGINNING
                self._furthest = max(self._furthest, version)
                if self._first is not None and version.is_steps_after(self._first[1]):
                    self._resumed(now - self._first[0])
            case seen.WorkerLost(worker, why, exit_code):
                why = why if exit_code is None else f"{why} (exit code {exit_code})"
                self._explain(lambda departure: departure.record.worker == worker, why, False, now)
            case seen.SlotEnded(slot, why):  # a local agent's exit, or Spark's word about the task
                self._explain(lambda departure: departure.whole and departure.record.place.slot == slot, why, True, now)
            case seen.ExecutorLost(executor, why):
                self._explain(lambda departure: departure.record.place.executor == executor, why, True, now)
        for command in commands:
            if isinstance(command, PublishWorld):
                self._next = command.world

    def note(self, record: Record) -> None:
        """Take in what was announced."""
        if self._first is not None and isinstance(record, (WorldBroken, WorldStarted, JobEnded)):
            self._resumed(None)
        if self._waits is not None and isinstance(record, (Waiting, WorldStarted, JobEnded)):
            wait = self._changes[self._waits]
            self._changes[self._waits] = replace(wait, lasted_s=record.at - wait.at)
            self._waits = None
        match record:
            case WorkerLeft():
                self._on_left(record)
            case WorldBroken():
                self._broken = record
            case WorldStarted():
                self._on_started(record)
            case Waiting(at, reason):
                self._waits = self._add(MembershipChange(at, "waiting", "", reason, self.size, self.size))
            case PlaceCooledDown(at, kind, name, failures, until):
                if until - at >= WORTH_A_WORD_S:
                    times = "once" if failures == 1 else f"{failures} times"
                    text = f"failed {times} and rests for {until - at:.1f} s"
                    self._add(MembershipChange(at, "resting", f"{kind} {name}", text, self.size, self.size))
            case JobEnded(at, outcome, why):
                self._open = []
                reason = re.sub(r"^1 workers are", "1 worker is", why.partition("\n")[0])
                self._add(MembershipChange(at, outcome, "", reason, self.size, self.size))

    def notice(self, worker: WorkerId, text: str, now: float) -> None:
        """Take in what a worker has to say to people; a job has room for so many."""
        self._notices += 1
        if self._notices > MOST_NOTICES:
            return
        if self._notices == MOST_NOTICES:
            text += " (what else workers have to say is in their own logs)"
        known = self._world is not None and worker in self._world.workers
        who = f"rank {self._world.member(worker).rank}" if self._world is not None and known else "a worker"
        self._add(MembershipChange(now, "notice", who, text, self.size, self.size))

    def _add(self, change: MembershipChange) -> int:
        self._changes.append(change)
        return len(self._changes) - 1

    def _on_left(self, record: WorkerLeft) -> None:
        reason, before = plain_reason(record.why), self.size
        kind = "lost"
        if record.graceful:
            kind, reason = ("drained", "decommissioned") if "decommission" in reason else ("left", reason)
        departure = _Departure(record, reason, record.why.startswith(("its agent", "its task", "executor")))
        member = self._world is not None and record.worker in self._world.workers
        if member:
            self._gone.add(record.worker)
        elif record.graceful:
            return  # one that was never missed
        last = self._open[-1] if self._open else None
        same = member and last is not None and (self._changes[last].kind, self._changes[last].reason) == (kind, reason)
        if same and last is not None:
            self._changes[last] = replace(self._changes[last], after=self.size)
            self._departures[last].append(departure)
            self._tell(last)
            return
        index = self._add(MembershipChange(record.at, kind, departure.name, reason, before, self.size, open=member))
        self._departures[index] = [departure]
        if member:
            self._open.append(index)

    def _explain(self, of: Callable[[_Departure], bool], why: str, whole: bool, now: float) -> None:
        """More is known of a loss than when it was noticed."""
        reason = plain_reason(why)
        for index, departures in self._departures.items():
            if self._changes[index].kind == "lost" and now - self._changes[index].at < LATE_S:
                for departure in filter(of, departures):
                    departure.whole = departure.whole or whole
                    if is_vague(departure.reason) and not is_vague(reason):
                        departure.reason = reason
                self._tell(index)

    def _tell(self, index: int) -> None:
        departures = self._departures[index]
        names = list(dict.fromkeys(departure.name for departure in departures))
        reasons = dict.fromkeys(departure.reason for departure in departures)
        self._changes[index] = replace(self._changes[index], who=_all(names), reason="; ".join(reasons))

    def _on_started(self, record: WorldStarted) -> None:
        old, new = self._world, self._next
        if new is None or new.round != record.round:
            return
        stayed = 0 if old is None else old.size - len(self._gone)
        opened, self._open = self._open, []
        self._world, self._gone = new, set()
        version = new.version or BEGINNING
        lost = version.steps_lost(self._furthest)
        self._furthest = version
        if old is None:
            self._add(MembershipChange(record.at, "started", "", record.why, 0, new.size))
            return
        newcomers = [member.place for member in new.members if member.worker not in old.workers]
        begin = record.at - (record.pause_s or 0.0)
        if newcomers:
            who = _newcomers(newcomers)
            opened.append(self._add(MembershipChange(begin, "joined", who, "", stayed, new.size)))
        if not opened:
            why = plain_reason(self._broken.why) if self._broken is not None else record.why
            opened.append(self._add(MembershipChange(begin, "broken", f"round {old.round}", why, new.size, new.size)))
        self._broken = None
        first, *others = opened
        for index in others:  # one pause, however much changed in it
            self._changes[index] = replace(self._changes[index], open=False)
        self._changes[first] = replace(self._changes[first], pause_s=record.pause_s, steps_lost=lost, open=True)
        self._paused = first
        self._first = (begin, version)
        if new.version is None:
            self._resumed(None)  # no loop that tells of its steps

    def _resumed(self, pause_s: float | None) -> None:
        """The newest world has done its first step; None: nobody knows when, and it counts from its beginning."""
        change = self._changes[self._paused]
        self._changes[self._paused] = replace(
            change, open=False, pause_s=change.pause_s if pause_s is None else pause_s
        )
        self._first = None


def is_vague(reason: str) -> bool:
    """Whether a reason tells only how a loss was noticed."""
    return _VAGUE.search(reason) is not None


def plain_reason(why: str) -> str:
    """What happened, without how it was noticed, if both are known."""
    short = _PREFIXES.sub("", why)
    if short.startswith(_AGENT_KILLED):
        return short
    if (killed := _SIGNAL.search(short)) is not None:
        name = killed.group(1)
        return f"killed by signal {_SIGNALS.get(name, name)}"
    if (exited := _EXIT.search(short)) is not None:
        code = int(exited.group(1))
        if code < 0 or 128 < code < 160:
            return f"killed by signal {-code if code < 0 else code - 128}"
        return f"exited with code {code}"
    return short


def _newcomers(places: Sequence[Place]) -> str:
    where = [p.host if p.executor.startswith(LOCAL) else f"executor {p.executor}" for p in places]
    count = "a worker" if len(places) == 1 else f"{len(places)} workers"
    return f"{count} on {', '.join(dict.fromkeys(where))}"


def _all(names: Sequence[str]) -> str:
    """Of several of a kind: "executors 3, 5"."""
    parts = [re.fullmatch(r"(executor|rank) (\S+)( on .*)?", name) for name in names]
    kinds = {part and (part[1], part[3]) for part in parts}
    if len(names) == 1 or len(kinds) > 1 or None in kinds:
        return ", ".join(names)
    ((noun, where),) = (kind for kind in kinds if kind)
    return f"{noun}s {', '.join(sorted(part[2] for part in parts if part))}{where or ''}"


def workers_in_words(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def steps_in_words(steps: int) -> str:
    return "no step lost" if steps == 0 else "1 step lost" if steps == 1 else f"{steps} steps lost"


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"
