"""Which workers of a round are ready, which succeeded and which failed: a view of the membership machine."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from spark_elastic.membership.commands import Announce, Command, FinishJob, PublishWorld, RerunFunction
from spark_elastic.membership.events import Event, WorkerDone
from spark_elastic.membership.timeline import WorkerJoined, WorkerLeft
from spark_elastic.membership.topology import WorkerId, World

_ROUNDS_KEPT = 100
"""Older rounds are forgotten: a job may go through thousands."""


class RecordedState(enum.Enum):
    """What a worker's part in a round came to."""

    READY = "ready"
    SUCCESS = "success"
    FAILURE = "failure"


@dataclass(slots=True)
class RoundRecord:
    """One round: its members, and what became of each."""

    round: int
    states: dict[WorkerId, RecordedState] = field(default_factory=dict)

    def count(self, state: RecordedState) -> int:
        return Counter(self.states.values())[state]


class WorkerStateRegistry:
    """READY, SUCCESS and FAILURE per worker and round, fed with what the machine was told and what it answered.

    Round 0 holds the workers that wait for their first world. A worker is READY in a round from the moment it is
    published there; SUCCESS when its function returned, unless that has to be run again; FAILURE when it was lost or
    removed. A process that exits 0 without its function having returned is a FAILURE like any other; one that left
    gracefully (drained, dismissed, run again from the start) is no longer recorded for the round.
    """

    def __init__(self, reset_limit: int | None = None) -> None:
        self.reset_limit = reset_limit
        self._rounds: deque[RoundRecord] = deque([RoundRecord(0)], maxlen=_ROUNDS_KEPT)
        self._waiting = self._rounds[0]
        self._finished: tuple[WorkerId, ...] = ()

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """Take in one event and the machine's answer to it."""
        for command in commands:
            if isinstance(command, PublishWorld):
                self._published(command.world)
            elif isinstance(command, FinishJob):
                self._finished = command.workers
            elif isinstance(command, Announce) and isinstance(command.record, WorkerJoined):
                self._waiting.states[command.record.worker] = RecordedState.READY
            elif isinstance(command, Announce) and isinstance(command.record, WorkerLeft):
                self._left(command.record)
        if isinstance(event, WorkerDone) and self.state(event.worker) is RecordedState.READY:
            self._current.states[event.worker] = RecordedState.SUCCESS
        for command in commands:
            if isinstance(command, RerunFunction) and command.worker in self._current.states:
                self._current.states[command.worker] = RecordedState.READY

    def _published(self, world: World) -> None:
        for worker in world.workers:
            self._waiting.states.pop(worker, None)
        self._rounds.append(RoundRecord(world.round, {m.worker: RecordedState.READY for m in world.members}))

    def _left(self, record: WorkerLeft) -> None:
        self._waiting.states.pop(record.worker, None)
        if record.worker not in self._current.states:
            return
        if record.graceful:
            del self._current.states[record.worker]
        else:
            self._current.states[record.worker] = RecordedState.FAILURE

    @property
    def _current(self) -> RoundRecord:
        return self._rounds[-1]

    @property
    def round(self) -> int:
        """The newest round; 0 before the first world."""
        return self._current.round

    @property
    def resets(self) -> int:
        """Worlds built after the first."""
        return max(0, self.round - 1)

    @property
    def resets_left(self) -> int | None:
        """Worlds that may still be built; None: no limit."""
        return None if self.reset_limit is None else max(0, self.reset_limit - self.resets)

    @property
    def results_from(self) -> tuple[WorkerId, ...]:
        """The workers whose results the finished job returns, in order; empty while it runs."""
        return self._finished

    def state(self, worker: WorkerId) -> RecordedState | None:
        """The worker's state in the newest round; None: it is not in it."""
        return self._current.states.get(worker)

    def count(self, state: RecordedState, round: int | None = None) -> int:
        """How many workers of a round (the newest, if none is named) are in that state.

        Raises: KeyError: if the round is unknown or so old that it was forgotten.
        """
        return self.record(self.round if round is None else round).count(state)

    def record(self, round: int) -> RoundRecord:
        """Raises: KeyError: if the round is unknown or so old that it was forgotten."""
        for record in (self._waiting, *self._rounds):
            if record.round == round:
                return record
        raise KeyError(round)
