"""What the membership machine wants done: imperatives, carried out by the driver's edges in order."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.errors import JobError
from spark_elastic.membership.timeline import Record
from spark_elastic.membership.topology import AgentId, SlotId, WorkerId, World


@dataclass(frozen=True, slots=True)
class LaunchSlot:
    """Submit the slot's Spark job (or start its local agent). Ends with a `SlotEnded`."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class WithdrawSlot:
    """Stop the slot's launch, pending or running, and do not repeat it."""

    slot: SlotId
    why: str


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Tell the agent to start its worker process under this id."""

    agent: AgentId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Tell the agent to kill the worker's process. Repeats are harmless."""

    agent: AgentId
    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class AdmitProvisionally:
    """Let a worker out of `init()` while a world is running, with the position it will probably get.

    It builds its model and comes back with `WorkerReady(at_init=False)`; only then is the world interrupted. Also
    sent to a worker that stands in an earlier loop than the job: it goes on to the loop of that number.
    """

    worker: WorkerId
    rank: int
    size: int
    loop: int = 1


@dataclass(frozen=True, slots=True)
class PublishWorld:
    """Send the world to each of its members; key-value pairs of older rounds can go."""

    world: World


@dataclass(frozen=True, slots=True)
class NotifyHostsUpdated:
    """Tell every worker that the world is to change; they agree on the step where they stop for it."""

    workers: tuple[WorkerId, ...]
    sequence: int
    """Grows by one with each update, so two in the same second are two."""


@dataclass(frozen=True, slots=True)
class CutPeers:
    """Tell the workers to shut the round's sockets, so that a collective blocked on a dead peer raises now."""

    workers: tuple[WorkerId, ...]
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class RerunFunction:
    """Have a worker whose function returned call it again, with the state kept: its world broke before the job ended.

    What it had returned counts for nothing.
    """

    worker: WorkerId
    run: int
    """Number of the call: what an earlier one returned does not count."""
    why: str


@dataclass(frozen=True, slots=True)
class DismissAgent:
    """The agent is no longer needed: end its worker, return from the task without a result."""

    agent: AgentId
    why: str


@dataclass(frozen=True, slots=True)
class FinishJob:
    """All members are done: every agent returns; results come back in this order of workers."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job cannot go on: stop everything and raise this in the caller."""

    error: JobError


@dataclass(frozen=True, slots=True)
class Announce:
    """A membership fact for the timeline and the log."""

    record: Record


Command = (
    LaunchSlot
    | WithdrawSlot
    | StartWorker
    | StopWorker
    | AdmitProvisionally
    | PublishWorld
    | NotifyHostsUpdated
    | CutPeers
    | RerunFunction
    | DismissAgent
    | FinishJob
    | FailJob
    | Announce
)
