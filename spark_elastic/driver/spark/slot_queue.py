"""Keeps jobs that share a SparkContext from holding slots that only together would be enough for one of them.

Two jobs of three workers each on four slots: with two slots each, both would wait until their timeouts. So one job
gathers its minimum at a time, in order of arrival; a job that has trained and fell below its minimum goes first, and a
job that has not begun gives back what it has gathered so far for it.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_elastic.driver.launcher import Launcher, OnEnded
from spark_elastic.membership.reasons import LossCause, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId

if TYPE_CHECKING:
    from pyspark import SparkContext


log = logging.getLogger(__name__)


class Turn(enum.Enum):
    WAITING = "another job is gathering its workers"
    GATHERING = "gathering its minimum"
    HOLDING = "has its minimum"


class Ticket:
    """One job's place in the queue. Made by `SlotArbiter.enter`."""

    def __init__(self, arbiter: SlotArbiter, job: str, on_change: Callable[[], None]) -> None:
        self._arbiter = arbiter
        self.job = job
        self.on_change = on_change
        self.turn = Turn.WAITING
        self.has_begun = False
        """Whether it ever held its minimum: then its agents hold a training state and are not taken from it."""

    def gathered(self) -> None:
        """The job has its minimum; the next one may gather."""
        self._arbiter._move(self, Turn.HOLDING)

    def short(self) -> None:
        """The job fell below its minimum and has to gather again."""
        self._arbiter._move(self, Turn.WAITING)

    def leave(self) -> None:
        """The job is over, however it ended. Repeats are harmless."""
        self._arbiter._leave(self)

    def is_contended(self) -> bool:
        """Whether another job waits for its minimum."""
        return self._arbiter._others_wait(self)

    def waits_for(self) -> str | None:
        """The job that gathers now, if it is another one; for the reason of a wait."""
        return self._arbiter._who_gathers_before(self)


class SlotArbiter:
    """The queue of the jobs of one SparkContext. Any thread may call; `on_change` is called without the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []  # in order of arrival

    def enter(self, job: str, on_change: Callable[[], None]) -> Ticket:
        """Queue up. `on_change` is called, from any thread, whenever a ticket of this arbiter moves: look again."""
        ticket = Ticket(self, job, on_change)
        with self._lock:
            self._tickets.append(ticket)
            others = self._settle()
        _tell(others)
        return ticket

    def _move(self, ticket: Ticket, turn: Turn) -> None:
        with self._lock:
            if ticket not in self._tickets or ticket.turn is turn:
                return
            if turn is Turn.WAITING and ticket.turn is Turn.GATHERING:
                return  # it is gathering already
            ticket.turn = turn
            ticket.has_begun = ticket.has_begun or turn is Turn.HOLDING
            others = self._settle()
        _tell(others)

    def _leave(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket not in self._tickets:
                return
            self._tickets.remove(ticket)
            others = self._settle()
        _tell(others)

    def _settle(self) -> list[Ticket]:
        """Give the turn to whoever is next; returns whom to tell."""
        gathering = next((t for t in self._tickets if t.turn is Turn.GATHERING), None)
        waiting = [t for t in self._tickets if t.turn is Turn.WAITING]
        urgent = next((t for t in waiting if t.has_begun), None)
        if gathering is not None and not gathering.has_begun and urgent is not None:
            gathering.turn = Turn.WAITING
            gathering = None
        if gathering is None and waiting:
            (urgent or waiting[0]).turn = Turn.GATHERING
        return list(self._tickets)

    def _others_wait(self, ticket: Ticket) -> bool:
        with self._lock:
            return any(other.turn is not Turn.HOLDING for other in self._tickets if other is not ticket)

    def _who_gathers_before(self, ticket: Ticket) -> str | None:
        with self._lock:
            return next((t.job for t in self._tickets if t.turn is Turn.GATHERING and t is not ticket), None)


def _tell(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.on_change()


_arbiters: dict[str, SlotArbiter] = {}
_arbiters_lock = threading.Lock()


def arbiter_of(sc: SparkContext) -> SlotArbiter:
    """The one arbiter of this SparkContext."""
    with _arbiters_lock:
        return _arbiters.setdefault(str(sc.applicationId), SlotArbiter())


class AdmittedLauncher:
    """A `Launcher` that passes launches on when it is the job's turn, and holds them until then.

    While another job waits for its minimum, this one is held to its own: launches beyond it stay held, and those that
    no agent has answered yet are taken back. A slot taken back counts as launched all along; its end is not reported.

    Args:
        need: the job's min_num_proc.
        build: makes the launcher that does the work, given the `on_ended` it has to call.
        on_ended: the driver's; called for held slots that are withdrawn, too.
    """

    def __init__(
        self, arbiter: SlotArbiter, job: str, need: int, build: Callable[[OnEnded], Launcher], on_ended: OnEnded
    ) -> None:
        self._need = need
        self._on_ended = on_ended
        self._lock = threading.RLock()
        self._held: set[SlotId] = set()
        self._launched: set[SlotId] = set()
        self._taken_back: dict[SlotId, LossCause | None] = {}  # the reason of a withdrawal that came meanwhile
        self._joined: frozenset[SlotId] = frozenset()
        self._closed = False
        self._launcher = build(self._ended)
        self._arbiter = arbiter
        self._job = job
        self._ticket: Ticket | None = None
        self._said: str | None = None

    def launch(self, slot: SlotId) -> None:
        if self._ticket is None:  # not before: a job that cannot be placed yet keeps nobody waiting
            self._ticket = self._arbiter.enter(self._job, self._look_again)
        with self._lock:
            if slot in self._held or slot in self._launched or slot in self._taken_back:
                raise ValueError(f"slot {slot} is still running; wait for its end before the next launch")
            self._held.add(slot)
        self._look_again()

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        with self._lock:
            if slot in self._taken_back:
                self._taken_back[slot] = cause  # its end will be reported after all
                return
            if slot in self._launched:
                self._launcher.withdraw(slot, cause)
                return
            if slot not in self._held:
                return
            self._held.remove(slot)
        self._on_ended(slot, cause, None)

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        with self._lock:
            if slot not in self._launched or not self._launcher.admit(slot, launch):
                return False
            self._joined |= {slot}  # from here on it is not taken back as one that no agent has answered
            return True

    def agents_joined(self, slots: frozenset[SlotId]) -> None:
        """The slots that have a live agent now; to be told at each change."""
        with self._lock:
            had, self._joined = len(self._joined), slots
        if self._ticket is None:
            return
        if len(slots) >= self._need:
            self._ticket.gathered()
        elif had >= self._need:
            self._ticket.short()
        self._look_again()

    def gone(self) -> str | None:
        return self._launcher.gone()

    def could_not_submit(self, slot: SlotId) -> bool:
        return self._launcher.could_not_submit(slot)

    def close(self, deadline_s: float) -> None:
        with self._lock:
            self._closed = True
            held, self._held = self._held, set()
        try:
            self._launcher.close(deadline_s)
        finally:
            if self._ticket is not None:
                self._ticket.leave()
        for slot in sorted(held):
            self._on_ended(slot, reported("the job is over"), None)

    def _look_again(self) -> None:
        with self._lock:
            ticket = self._ticket
            if self._closed or ticket is None:  # the arbiter's first call comes from within `enter`
                return
            limit = self._limit(ticket)
            spare = sorted(self._launched - self._keepable(ticket), reverse=True)
            while len(self._launched) > limit and spare:
                slot = spare.pop(0)
                self._launched.remove(slot)
                self._taken_back[slot] = None
                self._launcher.withdraw(slot, reported("given back: another job waits for its minimum"))
            for slot in sorted(self._held)[: max(limit - len(self._launched), 0)]:
                self._held.remove(slot)
                self._launched.add(slot)
                self._launcher.launch(slot)
            self._say(ticket.waits_for() if self._held else None)

    def _say(self, before: str | None) -> None:
        if before is not None and before != self._said:
            log.info("%s holds %d launches back until job %s has its workers", self._job, len(self._held), before)
        self._said = before

    def _limit(self, ticket: Ticket) -> int:
        """How many slots may be launched now."""
        if ticket.turn is Turn.WAITING:
            return len(self._joined) if ticket.has_begun else 0
        if ticket.is_contended():
            return max(self._need, len(self._joined))
        return len(self._launched) + len(self._held)

    def _keepable(self, ticket: Ticket) -> frozenset[SlotId]:
        """Slots that are not taken back: those whose agents may hold a state."""
        return frozenset() if ticket.turn is Turn.WAITING and not ticket.has_begun else self._joined

    def _ended(self, slot: SlotId, cause: LossCause, outcome: AgentOutcome | None) -> None:
        with self._lock:
            if slot in self._taken_back:
                withdrawn = self._taken_back.pop(slot)
                report = withdrawn is not None or outcome is not None or self._closed
                cause = withdrawn or cause
                if not report:
                    self._held.add(slot)
            else:
                self._launched.discard(slot)
                report = True
        if report:
            self._on_ended(slot, cause, outcome)
        self._look_again()
