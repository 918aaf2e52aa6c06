"""The commands of the membership machine: imperatives that the driver carries out in order."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.errors import JobError
from spark_elastic.membership.reasons import LossCause, WorldChange
from spark_elastic.membership.timeline import Record
from spark_elastic.membership.topology import AgentId, SlotId, WorkerId, World


class Command:
    """The base of all commands."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LaunchSlot(Command):
    """Submit the slot's Spark job (or start its local agent). The end of the launch is reported by a `SlotEnded`."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class WithdrawSlot(Command):
    """Stop the slot's launch, pending or running, and do not repeat it."""

    slot: SlotId
    cause: LossCause


@dataclass(frozen=True, slots=True)
class StartWorker(Command):
    """Tell the agent to start its worker process under this id."""

    agent: AgentId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class StopWorker(Command):
    """Tell the agent to kill the worker's process. Repeats are harmless."""

    agent: AgentId
    worker: WorkerId
    cause: LossCause


@dataclass(frozen=True, slots=True)
class AdmitProvisionally(Command):
    """Let a worker out of `init()` while a world is running, with the position it will probably get.

    It builds its model and comes back with `WorkerReady(at_init=False)`; only then is the world interrupted. Also sent
    to a worker that waits in an earlier elastic loop than the job is in: that worker skips to loop number `loop`.
    """

    worker: WorkerId
    rank: int
    size: int
    loop: int = 1


@dataclass(frozen=True, slots=True)
class PublishWorld(Command):
    """Send the world to each of its members. The key-value pairs of older rounds may be deleted."""

    world: World


@dataclass(frozen=True, slots=True)
class NotifyHostsUpdated(Command):
    """Tell the members that their world will be replaced, so that they agree on a step at which to stop."""

    workers: tuple[WorkerId, ...]
    sequence: int  # grows by one with each update, so that two updates in one second differ


@dataclass(frozen=True, slots=True)
class CutPeers(Command):
    """Tell the workers to shut down the round's sockets, so that a collective blocked on a dead peer fails at once."""

    workers: tuple[WorkerId, ...]
    round: int
    change: WorldChange


@dataclass(frozen=True, slots=True)
class RerunFunction(Command):
    """Have a worker call its function again with its present state, as its world broke after the function returned."""

    worker: WorkerId
    run: int  # number of the call; only the result of the newest one counts
    change: WorldChange


@dataclass(frozen=True, slots=True)
class DismissAgent(Command):
    """Have an agent end its worker and return from its task without a result."""

    agent: AgentId
    cause: LossCause


@dataclass(frozen=True, slots=True)
class TryConnections(Command):
    """Have the agents try again which addresses of one another they reach: worlds break, and no loss explains it."""


@dataclass(frozen=True, slots=True)
class FinishJob(Command):
    """End the job: all members are done, and their results are returned in this order of workers."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class FailJob(Command):
    """End the job: stop everything and raise the error in the caller."""

    error: JobError


@dataclass(frozen=True, slots=True)
class Announce(Command):
    """Add a record to the timeline and the log."""

    record: Record
