"""The phases of a job and the states of a worker, with all their transitions; and the outcome of an agent.

`Table.check` raises on any other transition. `docs/protocol.md` is generated from these tables.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

from spark_elastic.membership.reasons import LossCause, LossKind
from spark_elastic.membership.topology import WorkerId


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """The value that an agent returns from its Spark task, or from its own process if it runs locally."""

    worker: WorkerId | None  # the finished worker whose result this is; None: no result is delivered
    result: bytes | None  # the bytes that the worker pickled
    why: str  # how the agent's run ended, in words
    kind: LossKind = LossKind.REPORTED
    """UNEXPLAINED: its channel to the driver closed, a symptom of something that the driver may know better.
    UNREACHABLE: it could not connect to the driver."""

    @property
    def cause(self) -> LossCause:
        """The reason why the slot's launch is over."""
        return LossCause(self.kind, detail=self.why)


class Phase(enum.Enum):
    """The phase of the job as a whole. `PHASES` explains each."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    BROKEN = "broken"
    WAITING = "waiting"
    FINISHED = "finished"
    FAILED = "failed"


ENDED = (Phase.FINISHED, Phase.FAILED)


class WorkerState(enum.Enum):
    """The state of one worker process, as far as the driver knows. `WORKERS` explains each."""

    BOOTING = "booting"
    AT_INIT = "at_init"
    ADMITTED = "admitted"
    READY = "ready"
    TRAINING = "training"
    DONE = "done"
    GONE = "gone"


State = TypeVar("State", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class Table(Generic[State]):
    """All states of one kind, and all transitions between them."""

    name: str
    meaning: dict[State, str]
    transitions: dict[tuple[State, State], str]  # the reason for each transition, by (from, to)

    def check(self, before: State, after: State) -> None:
        """Raise RuntimeError if the table has no such transition, which is a bug in the membership machine."""
        if (before, after) not in self.transitions:
            known = ", ".join(state.name for state in self.leaving(before)) or "no other state"
            raise RuntimeError(f"{self.name}: no transition from {before.name} to {after.name}, only to {known}")

    def leaving(self, state: State) -> dict[State, str]:
        """Return the states that can follow, each with the reason."""
        return {after: why for (before, after), why in self.transitions.items() if before is state}


_P = Phase
PHASES: Table[Phase] = Table(
    "phase",
    {
        _P.CREATED: "nothing was launched yet",
        _P.STARTING: "no world and no state: workers gather for the first world. At most `start_timeout`; "
        "`elastic_timeout` when the job starts over",
        _P.RUNNING: "the members of a world train; silence is bounded by `heartbeat_timeout`",
        _P.INTERRUPTED: "the members were asked to stop at an agreed step and train until then. Once the first has "
        "stopped, the others have `heartbeat_timeout` before they are cut",
        _P.BROKEN: "a member is lost and the others were cut; each has `stall_timeout` to come back, or longer "
        "while it does what comes after the loop",
        _P.WAITING: "fewer than `min_num_proc`: the survivors keep their state, at most `elastic_timeout`; or a pause, "
        "because worlds broke in a row with no worker lost",
        _P.FINISHED: "every remaining member is done",
        _P.FAILED: "the job cannot continue",
    },
    {
        (_P.CREATED, _P.STARTING): "the job starts",
        (_P.CREATED, _P.FAILED): "cancelled",
        (_P.STARTING, _P.RUNNING): "enough workers are ready",
        (_P.STARTING, _P.FINISHED): "workers returned without ever asking for a world",
        (_P.STARTING, _P.FAILED): "too few workers in time, or they exit, raise, or the job is cancelled",
        (_P.RUNNING, _P.INTERRUPTED): "a newcomer is ready, or a member is to leave",
        (_P.RUNNING, _P.BROKEN): "a member is lost, or saw a collective fail",
        (_P.RUNNING, _P.FINISHED): "all members are done",
        (_P.RUNNING, _P.FAILED): "a worker raised, or the job is cancelled",
        (_P.INTERRUPTED, _P.RUNNING): "all members came: next world",
        (_P.INTERRUPTED, _P.BROKEN): "a member is lost, or did not stop where the others did",
        (_P.INTERRUPTED, _P.WAITING): "all came, but fewer than the minimum can go on",
        (_P.INTERRUPTED, _P.STARTING): "all came and no worker holds a state: start over",
        (_P.INTERRUPTED, _P.FINISHED): "all members are done",
        (_P.INTERRUPTED, _P.FAILED): "a worker raised, the reset limit is reached, or the job is cancelled",
        (_P.BROKEN, _P.RUNNING): "all survivors came: next world",
        (_P.BROKEN, _P.WAITING): "all survivors came, fewer than the minimum",
        (_P.BROKEN, _P.STARTING): "no worker holds a state and no step was ever applied: start over",
        (_P.BROKEN, _P.FINISHED): "all remaining members are done",
        (_P.BROKEN, _P.FAILED): "the state is lost, a worker raised, the reset limit is reached, or cancelled",
        (_P.WAITING, _P.RUNNING): "enough workers again: next world",
        (_P.WAITING, _P.STARTING): "the last holder is gone and no step was ever applied: start over",
        (_P.WAITING, _P.FINISHED): "the last unfinished survivor is gone, the others are done",
        (_P.WAITING, _P.FAILED): "too few workers in time, the state is lost, a worker raised, the reset limit is "
        "reached, one world after another broke, or cancelled",
    },
)

_W = WorkerState
WORKERS: Table[WorkerState] = Table(
    "worker",
    {
        _W.BOOTING: "its process starts and imports; at most `start_timeout`",
        _W.AT_INIT: "waits inside `init()` for a world",
        _W.ADMITTED: "was let out of `init()`, or past an earlier loop, while a world runs, and builds its model; at "
        "most `start_timeout`",
        _W.READY: "waits for a world at a step boundary in the elastic loop",
        _W.TRAINING: "a member of the current world: in the loop, or in the code after it",
        _W.DONE: "its function returned; the result is with its agent",
        _W.GONE: "exited, lost or removed",
    },
    {
        (_W.BOOTING, _W.AT_INIT): "Ready from `init()`",
        (_W.BOOTING, _W.READY): "Ready from the loop",
        (_W.BOOTING, _W.DONE): "the function returned without `init()`",
        (_W.AT_INIT, _W.ADMITTED): "AdmitProvisionally: a world with a state is running or regrouping",
        (_W.AT_INIT, _W.TRAINING): "PublishWorld",
        (_W.ADMITTED, _W.READY): "Ready from the loop",
        (_W.ADMITTED, _W.DONE): "the function returned without entering the loop",
        (_W.READY, _W.TRAINING): "PublishWorld",
        (_W.READY, _W.ADMITTED): "AdmitProvisionally: the job is in a later loop",
        (_W.TRAINING, _W.READY): "Ready after an interrupt or a failed collective",
        (_W.TRAINING, _W.DONE): "the function returned",
        **{
            (state, _W.GONE): "lost, removed or dismissed"
            for state in (_W.BOOTING, _W.AT_INIT, _W.ADMITTED, _W.READY, _W.TRAINING)
        },
        (_W.DONE, _W.TRAINING): "RerunFunction: its world broke before all members were done",
        (_W.DONE, _W.GONE): "its agent is lost, or it has to run again and cannot resume from a state",
    },
)
