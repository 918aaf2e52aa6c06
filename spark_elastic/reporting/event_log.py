"""The event log of a job: the changes of its world, each as a sentence for people.

It is made from the events and commands of the membership machine, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spark_elastic.errors import exit_in_words
from spark_elastic.membership import events as seen
from spark_elastic.membership import timeline
from spark_elastic.membership.commands import Command, PublishWorld, WithdrawSlot
from spark_elastic.membership.reasons import (
    LossCause,
    LossKind,
    Wait,
    WorldChange,
    change_in_words,
    counted,
    failures_in_words,
    loss_in_words,
    wait_on_bar,
)
from spark_elastic.membership.topology import BEGINNING, StateVersion, WorkerId, World
from spark_elastic.redaction import redacted

STARTED_AGAIN = "the function started again from its beginning: it was in no elastic loop"
ALL_STARTED_AGAIN = "all workers started again, as new processes"
_ROW_FIELDS = ("kind", "who", "reason", "before", "after", "pause_s", "steps_lost")
NO_EXECUTOR = ("driver", "local-")  # prefixes of names that are of no executor: local mode, plain processes
MOST_NOTICES = 200
MOST_NAMED = 12  # workers or executors of one change that are named; of the others only their number is told
WORTH_A_WORD_S = 5.0  # the shortest pause of a slot, executor or host that is reported
LATE_S = 15.0  # how long after a loss a report about the executor is taken for its cause


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """One thing that happened to the world. `str(change)` is its sentence."""

    at: float  # when it began. Seconds since 1970 in `job.changes()`
    kind: str
    """One of "started", "lost", "drained", "left", "joined", "broken", "waiting", "resting", "notice", "finished" and
    "failed"."""
    who: str  # the workers or executors concerned; empty for the job as a whole
    reason: str
    before: int  # workers before the change
    after: int  # workers after it
    pause_s: float | None = None
    """Time until the first step after the change, or until the new world was formed if steps are not reported; None:
    not known yet, or no pause."""
    steps_lost: int | None = None  # to be computed again; None: not known yet, no pause, or the function started again
    open: bool = False  # the pause is not over
    lasted_s: float | None = None  # the length of a wait that is over
    wait: Wait | None = None  # what is waited for, if the kind is "waiting"
    restarted: bool = False  # the function was called again from its beginning, because it was in no elastic loop
    restarts_world: bool = False  # the same by intention: with restart="world"
    unexplained: bool = False  # `reason` tells only how a loss was noticed; the cause often arrives a moment later

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", redacted(self.reason))  # an error of the user's own may name an address

    def __str__(self) -> str:
        cause = f" ({self.reason})" if self.reason else ""
        match self.kind:
            case "started":
                return f"training starts with {counted(self.after, 'worker')}"
            case "waiting":
                return self.reason
            case "resting":
                return f"{self.who} {self.reason}"
            case "notice":
                return f"{self.who}: {self.reason}"
            case "finished" | "failed":
                return f"the job {self.kind}: {self.reason}"
            case "broken":
                sizes = counted(self.after, "worker")
            case _ if self.before == self.after:
                sizes = f"still {counted(self.after, 'worker')}"
            case _:
                sizes = f"{self.before} -> {counted(self.after, 'worker')}"
        return f"{self.who} {self.kind}{cause}: {', '.join([sizes, *self.cost()])}"

    def cost(self, before: str = "") -> list[str]:
        """Return the length of the pause, with a word before it, and what was lost, as far as known."""
        words = []
        if self.pause_s is not None:
            words.append(f"{before}{self.pause_s:.2f} s" if self.pause_s < 9.995 else f"{before}{self.pause_s:.0f} s")
        if self.restarted:
            words.append(ALL_STARTED_AGAIN if self.restarts_world else STARTED_AGAIN)
        if self.steps_lost is not None:
            words.append(f"{counted(self.steps_lost, 'step')} lost" if self.steps_lost else "no step lost")
        return words


def event_rows(changes: Sequence[MembershipChange], began: float) -> tuple[dict[str, Any], ...]:
    """Return the changes of a job as plain values. `began` and the times of the changes are in seconds since 1970."""
    return tuple(
        {
            "seconds": round(change.at - began, 3),
            "time": round(change.at, 3),
            **{name: getattr(change, name) for name in _ROW_FIELDS},
            "text": str(change) if change.wait is None else wait_on_bar(change.wait),
        }
        for change in changes
    )


@dataclass(slots=True, eq=False)
class _Departure:
    """A worker that is gone."""

    record: timeline.WorkerLeft
    cause: LossCause
    whole: bool  # its agent or executor is gone too

    @property
    def name(self) -> tuple[str, str, str]:
        """Its noun, number and place: ("rank", "3", "on host-a"), ("executor", "5", "")."""
        place, rank = self.record.place, self.record.rank
        local = place.executor.startswith(NO_EXECUTOR)
        if self.whole and not local:
            return "executor", place.executor, ""
        where = f"on {place.host if local else f'executor {place.executor}'}"
        return ("a starting worker", "", where) if rank is None else ("rank", str(rank), where)


def _who(departures: Sequence[_Departure]) -> str:
    """Describe who left: several names of one kind as "executors 3, 5", others one by one."""
    every = list(dict.fromkeys(departure.name for departure in departures))
    names = every[:MOST_NAMED]
    others = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    noun, number, where = names[0]
    if len(names) == 1 or not number or len({(noun, where) for noun, _, where in names}) > 1:
        return ", ".join(" ".join(filter(None, name)) for name in names) + others
    numbers = ", ".join(sorted(number for _, number, _ in names)) + others
    return " ".join(filter(None, (f"{noun}s", numbers, where)))


class EventLog:
    """All changes of a job, oldest first, made from the membership machine's events, commands and records."""

    def __init__(self) -> None:
        #: New ones are appended; the newest are replaced when more is known about them.
        self.changes: list[MembershipChange] = []
        self._world: World | None = None
        self._next: World | None = None
        self._gone: set[WorkerId] = set()  # the present world's members that are gone
        self._open: list[int] = []  # indices of the changes that end with the next world
        self._departures: dict[int, list[_Departure]] = {}  # that may still be explained, by the index of their change
        self._broken: timeline.WorldBroken | None = None
        self._waits: int | None = None  # the index of the wait that is not over
        self._furthest = BEGINNING
        self._has_loop = False  # a worker was in an elastic loop
        self._restarts_world = False  # all workers start again with each world
        self._notices = 0
        #: Until the newest world has applied a step: the index of the change that the pause belongs to, when the pause
        #: began, and the version that the world starts from.
        self._pause: tuple[int, float, StateVersion] | None = None

    @property
    def size(self) -> int:
        """The number of workers of the present world that are not gone."""
        return 0 if self._world is None else self._world.size - len(self._gone)

    def observe(self, event: seen.Event, commands: Iterable[Command], now: float) -> None:
        """Update the log with an event and the machine's answer to it. `note` takes the records of the answer."""
        match event:
            case seen.WorkerAlive(_, version) | seen.WorkerReady(_, _, version):
                waits_in_loop = isinstance(event, seen.WorkerReady) and not event.at_init and event.loop > 0
                self._has_loop = self._has_loop or version is not None or waits_in_loop
                version = version or BEGINNING
                self._furthest = max(self._furthest, version)
                if self._pause is not None and version.is_steps_after(self._pause[2]):
                    self._resumed(now - self._pause[1])
            case seen.WorkerLost(worker, cause):
                self._explain([gone for gone in self._gone_so_far() if gone.record.worker == worker], cause, False, now)
            case seen.SlotEnded(slot, cause):  # a local agent's exit, or Spark's report about the task
                here = [gone for gone in self._gone_so_far() if gone.whole and gone.record.place.slot == slot]
                self._explain(here, cause, True, now)
            case seen.ExecutorLost(executor, cause):
                there = [gone for gone in self._gone_so_far() if gone.record.place.executor == executor]
                self._explain(there, cause, True, now)
        for command in commands:
            match command:
                case PublishWorld(world):
                    self._next = world
                case WithdrawSlot(slot, cause):  # its agent is lost too, after the worker was lost
                    noticed = [gone for gone in self._gone_so_far() if gone.cause.is_symptom]
                    self._explain([gone for gone in noticed if gone.record.place.slot == slot], cause, True, now)

    def _gone_so_far(self) -> list[_Departure]:
        return [gone for departures in self._departures.values() for gone in departures]

    def note(self, record: timeline.Record) -> None:
        """Update the log with a record of the timeline."""
        starts_or_ends = isinstance(record, (timeline.WorldStarted, timeline.JobEnded))
        if self._pause is not None and (starts_or_ends or isinstance(record, timeline.WorldBroken)):
            self._resumed(None)
        if self._waits is not None and (starts_or_ends or isinstance(record, timeline.WaitChanged)):
            self._update(self._waits, lasted_s=record.at - self.changes[self._waits].at)
            self._waits = None
        match record:
            case timeline.WorkerLeft():
                self._on_left(record)
            case timeline.WorldBroken():
                self._broken = record
            case timeline.WorldStarted():
                self._on_started(record)
            case timeline.WaitChanged(at):
                self._waits = self._add(at, "waiting", "", record.reason, wait=record.wait)
            case timeline.CooldownStarted(at, kind, name, failures, until):
                if until - at >= WORTH_A_WORD_S:
                    self._add(at, "resting", f"{kind} {name}", failures_in_words(failures, until - at))
            case timeline.JobEnded(at, outcome, why):
                self._open = []
                self._add(at, outcome, "", why.partition("\n")[0])

    def notice(self, worker: WorkerId, text: str, now: float) -> None:
        """Add a worker's message for people; at most `MOST_NOTICES` are kept."""
        self._notices += 1
        if self._notices > MOST_NOTICES:
            return
        if self._notices == MOST_NOTICES:
            text += " (further messages of workers are in their own logs)"
        known = self._world is not None and worker in self._world.workers
        who = f"rank {self._world.member(worker).rank}" if self._world is not None and known else "a worker"
        self._add(now, "notice", who, text)

    def _add(self, at: float, kind: str, who: str, reason: str, **fields: Any) -> int:
        """Append a change and return its index. It leaves the number of workers as it is unless `fields` say more."""
        sizes = {"before": self.size, "after": self.size}
        self.changes.append(MembershipChange(at, kind, who, reason, **(sizes | fields)))
        return len(self.changes) - 1

    def _update(self, index: int, **fields: Any) -> None:
        self.changes[index] = replace(self.changes[index], **fields)

    def _on_left(self, record: timeline.WorkerLeft) -> None:
        departure = _Departure(record, record.cause, record.cause.reaches_beyond_the_worker)
        reason, before = root_loss_in_words(record.cause), self.size
        kind = "left" if record.graceful else "lost"
        if record.cause.kind is LossKind.WORLD_RESTARTS:
            self._restarts_world = True
            return  # its slot has a new worker in the next world
        if record.graceful and record.cause.kind is LossKind.DECOMMISSIONED:
            kind, reason = "drained", "decommissioned"
        member = self._world is not None and record.worker in self._world.workers
        if member:
            self._gone.add(record.worker)
        elif record.graceful:
            return  # a worker that no world ever had
        if member and self._open:
            last = self._open[-1]
            if (self.changes[last].kind, self.changes[last].reason) == (kind, reason):
                self._departures[last].append(departure)
                self._update(last, after=self.size, who=_who(self._departures[last]))
                return
        unexplained = record.cause.is_symptom
        index = self._add(
            record.at, kind, _who([departure]), reason, before=before, open=member, unexplained=unexplained
        )
        self._departures[index] = [departure]
        if member:
            self._open.append(index)

    def _explain(self, concerned: list[_Departure], cause: LossCause, whole: bool, now: float) -> None:
        """Store the cause of departures that were noticed before. `whole`: their agents or executors are gone too."""
        for index in list(self._departures):
            departures, change = self._departures[index], self.changes[index]
            if now - change.at >= LATE_S and index not in self._open:
                del self._departures[index]
                continue
            found = [each for each in departures if change.kind == "lost" and each in concerned]
            for each in found if now - change.at < LATE_S else ():
                each.whole = each.whole or whole
                if each.cause.is_symptom and not cause.is_symptom:
                    each.cause = cause
            if found:
                reasons = list(dict.fromkeys(root_loss_in_words(each.cause) for each in departures))
                self._update(
                    index,
                    who=_who(departures),
                    reason="; ".join(reasons[:MOST_NAMED]),
                    unexplained=any(each.cause.is_symptom for each in departures),
                )

    def _on_started(self, record: timeline.WorldStarted) -> None:
        old, new = self._world, self._next
        if new is None or new.round != record.round:
            return
        stayed = 0 if old is None else old.size - len(self._gone)
        opened, self._open = self._open, []
        gone, self._world, self._gone = self._gone, new, set()
        version = new.version or BEGINNING
        restarted = new.version is None and not self._has_loop
        lost = None if restarted else version.steps_lost(self._furthest)
        self._furthest = version
        if old is None:
            self._add(record.at, "started", "", record.why, before=0)
            return
        kept_slots = {member.place.slot for member in old.members if member.worker not in gone}
        newcomers = [member.place for member in new.members if member.place.slot not in kept_slots]
        begin = record.at - (record.pause_s or 0.0)
        if newcomers:
            where = [p.host if p.executor.startswith(NO_EXECUTOR) else f"executor {p.executor}" for p in newcomers]
            count = "a worker" if len(newcomers) == 1 else f"{len(newcomers)} workers"
            who = f"{count} on {', '.join(dict.fromkeys(where))}"
            opened.append(self._add(begin, "joined", who, "", before=stayed))
        if not opened:
            broken = _first_reason(record.change) if self._broken is None else self._broken.change
            why = change_in_words(broken) if broken.cause is None else root_loss_in_words(broken.cause)
            opened.append(self._add(begin, "broken", f"round {old.round}", why))
        self._broken = None
        first, *others = opened
        for index in others:  # one pause, however many changes fall into it
            self._update(index, open=False)
        again = {"restarted": restarted, "restarts_world": self._restarts_world}
        self._update(first, pause_s=record.pause_s, steps_lost=lost, open=True, **again)
        self._pause = (first, begin, version)
        if new.version is None:
            self._resumed(None)  # no elastic loop that would report its steps

    def _resumed(self, pause_s: float | None) -> None:
        """End the pause of a change. `pause_s`: its length; None: it ended when the new world was formed."""
        assert self._pause is not None
        self._update(self._pause[0], open=False, **({} if pause_s is None else {"pause_s": pause_s}))
        self._pause = None


def _first_reason(change: WorldChange) -> WorldChange:
    return change if change.before is None else _first_reason(change.before)


def root_loss_in_words(cause: LossCause) -> str:
    """Describe the event that led to a loss, without the other things that were lost with it."""
    root = cause.root
    if root.kind is not LossKind.EXITED or root.code is None:
        return loss_in_words(root)
    # a shell, and Spark, report a signal as 128 + its number
    words = exit_in_words(128 - root.code if 128 < root.code < 160 else root.code)
    return words.removeprefix("was ").partition(" (")[0]
