"""The messages that cross a channel, and the specification that an agent is launched with.

A message is a frozen dataclass of plain values; `wire.encoding` makes bytes of it. A new message is a subclass of
`Message`.
"""

from __future__ import annotations

import ipaddress
import platform
import struct
import sys
from dataclasses import dataclass, field

import cloudpickle

from spark_elastic.membership.topology import Place, StateVersion, World
from spark_elastic.wire.ports import split_port

FUNCTION_PART_BYTES = 1 << 20


class Message:
    """The base of all messages."""


# --- agent -> driver ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentHello(Message):
    """First message of an agent: where it runs."""

    place: Place
    launch: int  # the slot's launch that started the agent; it may have been withdrawn since
    addresses: dict[str, tuple[str, ...]]  # by interface name, including loopback; IPv4 first
    probe_port: int
    """Port where the agent accepts and closes connections, so that others find addresses that reach it; 0: none."""
    ports_taken: str  # why the agent found no free port among those of `agent_ports`; "" if it did

    def __post_init__(self) -> None:
        _check_addresses(self.addresses)


@dataclass(frozen=True)
class InterfacesChanged(Message):
    """The network interfaces of the agent's host are others than it has said before."""

    addresses: dict[str, tuple[str, ...]]  # as in `AgentHello`
    probe_port: int

    def __post_init__(self) -> None:
        _check_addresses(self.addresses)


def _check_addresses(by_interface: dict[str, tuple[str, ...]]) -> None:
    for name, addresses in by_interface.items():
        if not addresses:
            raise ValueError(f"the interface {name!r:.40} has no address")
        for address in addresses:
            ipaddress.ip_address(address)


@dataclass(frozen=True)
class AgentHeartbeat(Message):
    """The agent is alive, and so is the worker process `running`."""

    running: int | None  # see `membership.events.AgentAlive`


@dataclass(frozen=True)
class WorkerDying(Message):
    """The worker's process dies, and not by itself. `WorkerExited` follows when the kernel has freed its memory."""

    worker: int
    exit_code: int | None  # as in `WorkerExited`; None if it is not known yet


@dataclass(frozen=True)
class WorkerExited(Message):
    """The worker's process has ended; a negative `exit_code` is the signal that killed it."""

    worker: int
    exit_code: int
    stderr_tail: str
    oom_kills: int  # the number of processes that the kernel killed for lack of memory while the worker ran
    memory: str  # a description of those kills and of the memory limits; "" if there were none


@dataclass(frozen=True)
class OutputLines(Message):
    """Whole lines that the worker printed to `stream` ("stdout" or "stderr"), without line ends."""

    worker: int
    stream: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class FunctionWanted(Message):
    """Send the next part of the pickled function, from this byte on: it did not come with the launch."""

    start: int


@dataclass(frozen=True)
class ResultStored(Message):
    """The function returned: the agent holds the result and returns it from its task when the job finishes."""

    worker: int
    has_loop: bool  # true if the worker ever entered an elastic loop
    run: int  # number of the function's call, see `RunAgain`; the newest result counts


@dataclass(frozen=True)
class PeersReachable(Message):
    """Answer to `ProbePeers`: the peers that it named, and those of them that accepted a connection."""

    tried: tuple[str, ...]
    reachable: tuple[str, ...]

    def __post_init__(self) -> None:
        for target in (*self.tried, *self.reachable):
            split_port(target)


# --- driver -> agent ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorkerProcess(Message):
    """Give a worker process this id and the function; start a process first if none is running."""

    worker: int


@dataclass(frozen=True)
class StopWorkerProcess(Message):
    """Kill the worker's process."""

    worker: int
    why: str


@dataclass(frozen=True)
class ProbePeers(Message):
    """Connect to each "address:port" and answer with `PeersReachable`."""

    peers: tuple[str, ...]


@dataclass(frozen=True)
class FunctionPart(Message):
    """Answer to `FunctionWanted`: the bytes from `start` on, `FUNCTION_PART_BYTES` at most."""

    start: int
    payload: bytes = field(repr=False)


@dataclass(frozen=True)
class FinishAgent(Message):
    """Return from the task, with the stored result if `keep_result`."""

    keep_result: bool
    why: str


# --- worker -> driver ---------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerHello(Message):
    """First message of a worker process, with the id that its agent gave it."""

    worker: int


@dataclass(frozen=True)
class WorkerHeartbeat(Message):
    """The worker is alive; the fields say how far its training is, see `membership.events.WorkerAlive`."""

    version: StateVersion | None
    blocked_s: float | None
    after_loop: bool
    begun: int


@dataclass(frozen=True)
class Ready(Message):
    """The worker waits for a world newer than `round`, with state `version`; see `membership.events.WorkerReady`."""

    round: int
    version: StateVersion | None
    at_init: bool
    loop: int


@dataclass(frozen=True)
class Raised(Message):
    """The user's function raised an exception, which fails the job."""

    error_type: str
    error: str
    traceback: str
    exit_code: int | None  # the code that a script exited with; None: it raised something else


@dataclass(frozen=True)
class Abandoned(Message):
    """A HorovodInternalError left the user's function: the process exits and has to be started again."""

    why: str


@dataclass(frozen=True)
class LiveProgress(Message):
    """Progress of rank 0's training for display, sent several times a second; losing one is harmless."""

    epoch: int  # from 0
    epochs: int
    phase: str  # either "train" or "validate"
    rows: int  # rows done, of `total`
    total: int
    values: dict[str, float]  # the loss and the metrics so far
    step_s: float = 0.0  # the time of a step
    worked_s: tuple[float, ...] = ()  # and how long each rank works in it, the rest of which it waits for the others


@dataclass(frozen=True)
class EpochEnded(Message):
    """Results of an epoch. A new rank 0 sends them again."""

    epoch: int
    epochs: int
    seconds: float
    values: dict[str, float]


@dataclass(frozen=True)
class EpochRow(Message):
    """An epoch's row of the history, as JSON, for callbacks on the driver. A new rank 0 sends them again."""

    epoch: int
    waits: bool  # the sender waits for an `EpochDecision` before the epoch ends
    payload: bytes


@dataclass(frozen=True)
class Notice(Message):
    """A message for the user about the training; kept in the job's event log."""

    text: str


@dataclass(frozen=True)
class KvSet(Message):
    """Store `payload` under the key; each round has separate keys."""

    round: int
    key: str
    payload: bytes


@dataclass(frozen=True)
class KvGet(Message):
    """Ask for a value. Answered by a `KvValue` once the key is set; not answered if the round ends first."""

    round: int
    key: str


@dataclass(frozen=True)
class KvGather(Message):
    """Add a value to those of a group. Answered by one `KvGathered` once all members have; not if the round ends."""

    round: int
    name: str  # the group, among those of the round
    rank: int  # the sender's rank in the group
    size: int
    value: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of a group of {self.size}")


# --- driver -> worker ---------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldAssigned(Message):
    """The next world; the receiver is a member of it."""

    world: World
    addresses: tuple[str, ...]  # the address that each member binds to, by rank

    def __post_init__(self) -> None:
        size = self.world.size
        if not 0 <= self.world.root < size:
            raise ValueError(f"a world of {size} members whose root is rank {self.world.root}")
        if any(member.rank != rank for rank, member in enumerate(self.world.members)):
            raise ValueError("the members are not in rank order")
        if len(self.world.workers) != size:
            raise ValueError("a worker is a member twice")
        if len(self.addresses) != size:
            raise ValueError(f"{size} members with {len(self.addresses)} addresses")


@dataclass(frozen=True)
class Provisional(Message):
    """Leave `init()` with this probable position; the worker joins the world from its elastic loop."""

    rank: int
    size: int
    loop: int  # number of the loop that the job is in; a worker in an earlier loop leaves that with its `LoopResult`


@dataclass(frozen=True)
class HostsUpdated(Message):
    """The world is about to change: raise `HostsUpdatedInterrupt` at the next agreed step."""

    sequence: int


@dataclass(frozen=True)
class Cut(Message):
    """The driver ends the round, because a member is lost or the world cannot continue: interrupt its collectives."""

    round: int
    why: str


@dataclass(frozen=True)
class RunAgain(Message):
    """The function returned but its world broke: call it again, with the states that its loops left."""

    run: int
    why: str


@dataclass(frozen=True)
class EpochDecision(Message):
    """Answer to an `EpochRow`: the reason to end the training after this epoch; "" to continue it."""

    epoch: int
    stop: str


@dataclass(frozen=True)
class KvValue(Message):
    """Answer to a `KvGet` of the newest round: the value of the key."""

    key: str
    payload: bytes


@dataclass(frozen=True)
class KvGathered(Message):
    """Answer to the `KvGather` of all members of a group: their values, by rank."""

    round: int
    name: str
    values: tuple[str, ...]


# --- either -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(Message):
    """The agent or worker is accepted: send heartbeats, and end after `silence_limit_s` without a message."""

    heartbeat_interval_s: float
    silence_limit_s: float
    stall_timeout_s: float  # how long a member may wait in a collective before the driver acts


@dataclass(frozen=True)
class LoopResult(Message):
    """The return value of an elastic loop, pickled and signed by the worker that it comes from.

    Rank 0 sends it when it enters the next loop; the driver sends it to newcomers that skip to that loop.
    """

    loop: int
    problem: str  # why there is no return value to send; "" if there is one
    payload: bytes


@dataclass(frozen=True)
class Pong(Message):
    """The driver's answer to a heartbeat, so that both sides notice silence."""


@dataclass(frozen=True)
class Goodbye(Message):
    """The sender closes the channel next; this is not a loss."""

    why: str


# --- the specification that a launched agent gets ------------------------------------------------


@dataclass(frozen=True)
class LaunchSpec:
    """Everything that an agent needs; the same for each slot of a job.

    It holds the job's key, so it travels only in Spark's own serialisation or through a launcher's pipe, pickled.
    """

    job: str  # the job's name in logs and descriptions
    driver_addresses: tuple[tuple[str, int], ...]  # of the driver's rendezvous server, in the order to try
    key: bytes = field(repr=False)  # the job's key for the channels
    function: bytes = field(repr=False)  # cloudpickle of (fn, args, kwargs); empty: the agent has to fetch it
    connect_timeout_s: float
    made_by: str  # `interpreter()` of the driver, for the error of a worker that cannot load the function
    env: dict[str, str] = field(default_factory=dict)  # variables to add to the worker's environment
    device: str = "auto"  # device of the workers: "auto", "cpu", "cuda" or "cuda:N"
    nics: tuple[str, ...] | None = None  # network interfaces that may carry collectives; None for any
    agent_ports: tuple[int, int] = (0, 0)  # the first and the last port at which the agents may listen; (0, 0) for any
    preimport: tuple[str, ...] = ("torch",)  # what a worker imports while it waits for its spec, see `modules_of`
    encrypt: bool = False  # whether the channels are encrypted
    fetched_bytes: int = 0  # size of the function that the agent has to fetch; 0 if the function came with the launch
    restarts_world: bool = False  # all workers start again when the world changes, with torchrun's environment
    keep_workers_s: float = 0.0  # how long an executor keeps a fork server of workers after the job; 0: none is used


RESULT_HEAD = struct.Struct("<?IQ")
"""The head of a result in the pipe from a worker to its agent: `has_loop`, number of the call, bytes of the result."""


def modules_of(function: bytes) -> tuple[str, ...]:
    """Guess from the names in a pickled function which slow modules to import early; a wrong guess only costs time."""
    if b"tensorflow" in function:
        return ("torch", "tensorflow", "keras", "spark_elastic.tensorflow")
    if b"keras" in function:  # keras imports the backend that KERAS_BACKEND names
        return ("torch", "keras", "spark_elastic.collective.operations")
    of_estimator = ("spark_elastic.ml.torch.train",) if b"spark_elastic.ml" in function else ()
    compiles = ("torch._dynamo",) if b"compile" in function else ()  # or else no worker needs it
    return ("torch", "spark_elastic.torch", *of_estimator, *compiles)


def slowest_import(modules: tuple[str, ...]) -> str:
    """Return the name of the package in `modules_of` that takes a worker the longest to import."""
    slow = {"tensorflow": "TensorFlow", "keras": "Keras"}
    return next((name for module, name in slow.items() if module in modules), "torch")


def interpreter() -> str:
    """Describe this process's Python and cloudpickle for error messages."""
    return f"Python {platform.python_version()} ({sys.executable}) with cloudpickle {cloudpickle.__version__}"
