"""What happened: facts in the past tense, the only input of the membership machine.

An event of an unknown, older or already replaced agent or worker changes nothing, so repeats and late arrivals are
harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_elastic.membership.reasons import LossCause, LossKind
from spark_elastic.membership.topology import AgentId, Place, SlotId, StateVersion, WorkerId


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The first event: the driver is up and can launch slots."""


@dataclass(frozen=True, slots=True)
class AgentJoined:
    """An agent authenticated and said where it runs. A slot's later agent has the higher id."""

    agent: AgentId
    place: Place


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent's channel closed, or it was silent too long; its worker is lost with it."""

    agent: AgentId
    cause: LossCause


@dataclass(frozen=True, slots=True)
class SlotEnded:
    """A slot's launch is over, whatever the cause; it can be launched again. Comes exactly once a launch."""

    slot: SlotId
    cause: LossCause
    submitted: bool = True
    """False: the driver itself could not submit it."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker can train: process up, imports done, standing at a step boundary and waiting for a world."""

    worker: WorkerId
    round: int
    """The last world it was in; 0: none."""
    version: StateVersion | None
    """Of the state it holds; None: it holds no state."""
    at_init: bool = False
    """True in `init()`, before the user's code built anything; False in the elastic loop."""
    loop: int = 1
    """Number of the elastic loop that it stands in; 0: in `init()`, whose world broke."""


@dataclass(frozen=True, slots=True)
class WorkerAlive:
    """A heartbeat, with the version of the state so far (None: holds no state).

    A version, that of the beginning included, says that the worker is inside of the elastic loop: before that it has to
    be None.
    """

    worker: WorkerId
    version: StateVersion | None = None
    blocked_s: float | None = None
    """How long it has waited in a collective for the others; None: it does not wait."""
    after_loop: bool = False
    """Its elastic loop has returned, and it has entered no other: it does what the function does after the loop."""
    begun: int = 0
    """The newest round in which it holds the state and has begun to train; 0: none."""


@dataclass(frozen=True, slots=True)
class AgentAlive:
    """A heartbeat of an agent."""

    agent: AgentId
    running: WorkerId | None = None
    """The worker whose process it sees running: neither stopped nor ended. None: there is none, or it cannot see."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker's channel closed or its process exited before it finished the function.

    Both are reported, in any order; the second only adds what the first did not know. An exit code of 0 is believed
    once the worker's channel has closed without a `WorkerDone`, or shortly after.
    """

    worker: WorkerId
    cause: LossCause
    stderr_tail: str = ""
    oom_kills: int = 0
    """Processes that the kernel killed for memory there while the worker ran."""
    memory: str = ""
    """The kernel's account of memory there; empty: nothing of note."""

    @property
    def exit_code(self) -> int | None:
        """Negative: killed by that signal; None: not known, only its channel closed."""
        return self.cause.code if self.cause.kind is LossKind.EXITED else None


@dataclass(frozen=True, slots=True)
class WorkerAbandoned:
    """The user's function let a HorovodInternalError out: no bug, but the process has to start over."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerDone:
    """The function returned and its result is with the agent."""

    worker: WorkerId
    in_loop: bool
    """Whether it ever entered the elastic loop; a plain function cannot be resumed, only run again."""
    run: int = 1
    """Number of the call of the function, which grows with each `RerunFunction`."""


@dataclass(frozen=True, slots=True)
class WorkerRaised:
    """The user's function raised: a bug, which fails the job at once."""

    worker: WorkerId
    error_type: str
    error: str
    traceback: str
    exit_code: int | None = None
    """The code that a script exited with; None: it raised something else."""


@dataclass(frozen=True, slots=True)
class ExecutorDecommissioned:
    """Spark announced that the executor will go; its workers should leave at a step boundary."""

    executor: str


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    executor: str
    cause: LossCause


@dataclass(frozen=True, slots=True)
class HostsObserved:
    """What a host discovery allows: slots per host. None as `hosts`: no restriction."""

    hosts: Mapping[str, int] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class CancelRequested:
    why: str


@dataclass(frozen=True, slots=True)
class DriverPaused:
    """The driver stood still and heard nobody. The machine's time has not gone on meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are looked at."""


Event = (
    JobStarted
    | AgentJoined
    | AgentLost
    | AgentAlive
    | SlotEnded
    | WorkerReady
    | WorkerAlive
    | WorkerLost
    | WorkerAbandoned
    | WorkerDone
    | WorkerRaised
    | ExecutorDecommissioned
    | ExecutorLost
    | HostsObserved
    | CancelRequested
    | DriverPaused
    | Tick
)
