"""Every message that crosses a channel, and its encoding.

A message is a frozen dataclass of plain values: JSON for the fields, raw bytes behind it for `payload`. Nothing is
ever unpickled. Decoding checks each field's type, so rubbish ends in a `ProtocolError`, never in the driver's state.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any

from spark_elastic.errors import ProtocolError
from spark_elastic.membership.topology import Place, StateVersion, World

# --- agent -> driver ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentHello:
    """First message of an agent. `launch`: the one that began it, which may be over by now. `addresses`: IPv4 addresses
    by interface name, loopback included."""

    place: Place
    launch: int
    pid: int
    addresses: dict[str, str]
    probe_port: int
    """Where it accepts connections and closes them, so that others see which addresses reach it; 0: nowhere."""
    cores: int
    accelerators: tuple[str, ...]
    python: str


@dataclass(frozen=True, slots=True)
class AgentHeartbeat:
    """See `membership.events.AgentAlive`."""

    running: int | None


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process is gone. `exit_code` < 0: killed by that signal. `oom_kills`, `memory`: as in
    `membership.events.WorkerLost`."""

    worker: int
    exit_code: int
    stderr_tail: str
    oom_kills: int
    memory: str


@dataclass(frozen=True, slots=True)
class OutputLines:
    """Whole lines that the worker printed, without their line ends. `stream`: "stdout" or "stderr"."""

    worker: int
    stream: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultStored:
    """The function returned: the agent holds its result and will return it when the job finishes.

    `in_loop`: whether the worker ever entered the elastic loop. `run`: number of the call of the function, see
    `RunAgain`; the newest result counts.
    """

    worker: int
    size: int
    in_loop: bool
    run: int


@dataclass(frozen=True, slots=True)
class PeersReachable:
    """Answer to `ProbePeers`: of the addresses asked about ("address:port"), those that accepted a connection."""

    reachable: tuple[str, ...]


# --- driver -> agent ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentWelcome:
    """`silence_limit_s`: how long the driver may stand still, its connection open, before it counts as dead."""

    heartbeat_interval_s: float
    silence_limit_s: float


@dataclass(frozen=True, slots=True)
class StartWorkerProcess:
    worker: int


@dataclass(frozen=True, slots=True)
class StopWorkerProcess:
    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """Try to connect to each "address:port" and answer with `PeersReachable`."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FinishAgent:
    """Return from the task; with the stored result if `keep_result`."""

    keep_result: bool
    why: str


# --- worker -> driver ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """First message of a worker process. `worker` is the id its agent was given for it."""

    worker: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """See `membership.events.WorkerAlive`."""

    version: StateVersion | None
    blocked_s: float | None
    after_loop: bool
    begun: int


@dataclass(frozen=True, slots=True)
class Ready:
    """See `membership.events.WorkerReady`."""

    round: int
    version: StateVersion | None
    at_init: bool
    loop: int


@dataclass(frozen=True, slots=True)
class Raised:
    """The user's function raised."""

    error_type: str
    error: str
    traceback: str
    exit_code: int | None
    """The code that a script exited with; None: it raised something else."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A HorovodInternalError left the user's function: the process will exit and has to be started again."""

    why: str


@dataclass(frozen=True, slots=True)
class LiveProgress:
    """How far rank 0 of a training is, for people: some times a second, of no consequence if it is lost.

    epoch: from 0. phase: "train" or "validate". rows: of `total`. values: the loss and the metrics so far.
    """

    epoch: int
    epochs: int
    phase: str
    rows: int
    total: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """What an epoch has come to. Repeated by whoever becomes rank 0."""

    epoch: int
    epochs: int
    seconds: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about a training that a person should see, and that is kept among the job's changes."""

    text: str


@dataclass(frozen=True, slots=True)
class KvSet:
    """Store `payload` under the key, in the round's own space."""

    round: int
    key: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class KvGet:
    """Answered by one `KvValues` as soon as every key is there; never, if the round ends first."""

    round: int
    request: int
    keys: tuple[str, ...]


# --- driver -> worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerWelcome:
    """`silence_limit_s`: as for agents. `stall_timeout_s`: for how long a collective may be waited for."""

    heartbeat_interval_s: float
    silence_limit_s: float
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class WorldAssigned:
    """The next world, of which the receiver is a member."""

    world: World
    addresses: dict[str, str]
    """For each worker id (as a string), the address that it binds to."""


@dataclass(frozen=True, slots=True)
class Provisional:
    """Leave `init()` with this probable position; the world is joined from the elastic loop.

    `loop`: the number of the one that the job is in. Who stands in an earlier one leaves that with its `LoopResult`.
    """

    rank: int
    size: int
    loop: int


@dataclass(frozen=True, slots=True)
class HostsUpdated:
    sequence: int


@dataclass(frozen=True, slots=True)
class Cut:
    round: int
    why: str


@dataclass(frozen=True, slots=True)
class RunAgain:
    """The function returned, but its world broke: call it again, with the states that its loops have left."""

    run: int
    why: str


@dataclass(frozen=True, slots=True)
class KvValues:
    """Answer to the `KvGet` with this request number: the values one after the other, `sizes` long each."""

    request: int
    sizes: tuple[int, ...]
    payload: bytes


# --- either -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What an elastic loop of the function returned, pickled and sealed by the worker that it comes from.

    Rank 0 sends it as it enters the next loop, the driver as it sends a newcomer on to that. `problem`: why there is
    none; empty: there is one.
    """

    loop: int
    problem: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    """The driver's answer to a heartbeat, so that silence is noticed on both sides."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender closes the channel next; not a loss."""

    why: str


Message = (
    AgentHello
    | AgentHeartbeat
    | WorkerExited
    | OutputLines
    | ResultStored
    | PeersReachable
    | AgentWelcome
    | StartWorkerProcess
    | StopWorkerProcess
    | ProbePeers
    | FinishAgent
    | WorkerHello
    | WorkerHeartbeat
    | Ready
    | Raised
    | Abandoned
    | LiveProgress
    | EpochEnded
    | Notice
    | KvSet
    | KvGet
    | WorkerWelcome
    | WorldAssigned
    | Provisional
    | HostsUpdated
    | Cut
    | RunAgain
    | KvValues
    | LoopResult
    | Pong
    | Goodbye
)

_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(Message)}
_HINTS: dict[type[Any], dict[str, Any]] = {}
_SEPARATOR = b"\n"


def encode(message: Message) -> bytes:
    """One message as bytes: a line of JSON, then the payload if the message has one."""
    fields = {f.name: _plain(getattr(message, f.name)) for f in dataclasses.fields(message) if f.name != "payload"}
    fields["type"] = type(message).__name__
    head = json.dumps(fields, separators=(",", ":")).encode()
    return head + _SEPARATOR + getattr(message, "payload", b"")


def decode(data: bytes) -> Message:
    """The message that `encode` made.

    Raises:
        ProtocolError: if the bytes are no message, or a field is missing, unknown or of the wrong type.
    """
    head, separator, payload = data.partition(_SEPARATOR)
    if not separator:
        raise ProtocolError("a frame without a message head")
    try:
        fields = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message head that is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("a message head that is not an object")
    name = fields.pop("type", None)
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message type {name!r}")
    hints = _hints(cls)
    if "payload" in hints:
        if "payload" in fields:
            raise ProtocolError(f"{name}: payload in the head")
        return typing.cast(Message, _build(cls, fields, name, payload=payload))
    if payload:
        raise ProtocolError(f"{name}: {len(payload)} bytes behind a message that carries none")
    return typing.cast(Message, _build(cls, fields, name))


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls)
        _HINTS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return _HINTS[cls]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _build(cls: type[Any], fields: dict[str, Any], where: str, **ready: Any) -> Any:
    hints = _hints(cls)
    missing = hints.keys() - fields.keys() - ready.keys()
    unknown = fields.keys() - hints.keys()
    if missing or unknown:
        raise ProtocolError(f"{where}: missing fields {sorted(missing)}, unknown fields {sorted(unknown)}")
    values = {name: _typed(value, hints[name], f"{where}.{name}") for name, value in fields.items()}
    try:
        return cls(**values, **ready)
    except ValueError as error:
        raise ProtocolError(f"{where}: {error}") from None


def _typed(value: Any, hint: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        return _typed(value, hint, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where}: expected a list")
        item_hint = typing.get_args(hint)[0]
        return tuple(_typed(item, item_hint, where) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where}: expected an object")
        item_hint = typing.get_args(hint)[1]
        return {key: _typed(item, item_hint, where) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ProtocolError(f"{where}: expected an object")
        return _build(typing.cast("type[Any]", hint), value, where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # exact: a bool is no int here
        raise ProtocolError(f"{where}: expected {hint.__name__}, got {type(value).__name__}")
    return value
