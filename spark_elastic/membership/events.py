"""The events of a job: facts in the past tense, the only input of the membership machine.

An event of an unknown, older or replaced agent or worker changes nothing, so repeats and late arrivals are harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_elastic.membership.reasons import LossCause, LossKind
from spark_elastic.membership.topology import AgentId, Place, SlotId, StateVersion, WorkerId


class Event:
    """The base of all events."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """The first event: the driver is up and can launch slots."""


@dataclass(frozen=True, slots=True)
class AgentJoined(Event):
    """An agent authenticated and reported where it runs. A later agent of the same slot has the higher id."""

    agent: AgentId
    place: Place


@dataclass(frozen=True, slots=True)
class AgentLost(Event):
    """An agent's channel closed. Its worker counts as lost too."""

    agent: AgentId
    cause: LossCause


@dataclass(frozen=True, slots=True)
class SlotEnded(Event):
    """A slot's launch is over, and the slot can be launched again. Comes exactly once for each launch."""

    slot: SlotId
    cause: LossCause
    submitted: bool = True  # False: the driver itself could not submit it


@dataclass(frozen=True, slots=True)
class WorkerReady(Event):
    """A worker waits for a world: its process is up, its imports are done, and it is at a step boundary."""

    worker: WorkerId
    round: int  # the last world it was in; 0: none
    version: StateVersion | None  # the version of its state; None: it holds no state
    at_init: bool = False  # True in `init()`, before the user's code built anything; False in the elastic loop
    loop: int = 1  # number of the elastic loop in which it waits; 0: in `init()`, whose world broke


@dataclass(frozen=True, slots=True)
class WorkerAlive(Event):
    """A heartbeat of a worker."""

    worker: WorkerId
    version: StateVersion | None = None  # of its state; None: it holds none, or has not entered the elastic loop yet
    blocked_s: float | None = None  # how long it has waited in a collective for the others; None: it does not wait
    after_loop: bool = False  # its elastic loop has returned, and it has entered no other
    begun: int = 0  # the newest round in which it holds the state and has begun to train; 0: none


@dataclass(frozen=True, slots=True)
class AgentAlive(Event):
    """A heartbeat of an agent."""

    agent: AgentId
    running: WorkerId | None = None  # the worker whose process runs; None: there is none, or it cannot be said


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """The worker's channel closed or its process exited before it finished the function.

    Both are reported, in any order; the second report only adds facts to the first. An exit code of 0 counts as a loss
    only when the worker's channel has closed without a `WorkerDone`, or shortly after the exit.
    """

    worker: WorkerId
    cause: LossCause
    stderr_tail: str = ""
    oom_kills: int = 0  # processes that the kernel killed for memory there while the worker ran
    memory: str = ""  # the kernel's account of memory there; empty: nothing of note

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative if a signal killed the process; None: only the channel is known to be closed."""
        return self.cause.code if self.cause.kind is LossKind.EXITED else None


@dataclass(frozen=True, slots=True)
class AddressLost(Event):
    """The host of a worker does not have the address any more at which the worker listens in its world."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerAbandoned(Event):
    """The user's function raised HorovodInternalError. This is no bug, but the process has to be started again."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerDone(Event):
    """The worker's function returned, and its agent has the result."""

    worker: WorkerId
    has_loop: bool  # the function entered an elastic loop; one that did not cannot be resumed, only run again
    run: int = 1  # number of the call of the function, which grows with each `RerunFunction`


@dataclass(frozen=True, slots=True)
class WorkerRaised(Event):
    """The user's function raised an exception: a bug, which fails the job at once."""

    worker: WorkerId
    error_type: str
    error: str
    traceback: str
    exit_code: int | None = None  # the code that a script exited with; None: it raised something else


@dataclass(frozen=True, slots=True)
class ExecutorDecommissioned(Event):
    """Spark announced that it takes the executor away; its workers should leave at a step boundary."""

    executor: str


@dataclass(frozen=True, slots=True)
class ExecutorLost(Event):
    """Spark reported that an executor is gone."""

    executor: str
    cause: LossCause


@dataclass(frozen=True, slots=True)
class HostsObserved(Event):
    """A host discovery reported the hosts that may be used."""

    hosts: Mapping[str, int] | None = None  # slots by host; None: no restriction


@dataclass(frozen=True, slots=True)
class CancelRequested(Event):
    """The caller wants the job to end."""

    why: str


@dataclass(frozen=True, slots=True)
class DriverPaused(Event):
    """The driver process was suspended and received nothing; the membership machine's time stood still meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed: the machine compares its deadlines with the present time."""
