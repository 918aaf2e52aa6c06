"""Simulated agents and workers for control_plane.py: thousands in a process, on real connections to a real driver.

    python tests/storms/simulated_peers.py < commands > events      (JSON, one object a line)

A real worker reads each world on its own machine; here the same bytes are read once for all peers of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._harness import raise_descriptor_limit
from spark_elastic.collective.gloo.rendezvous import compact
from spark_elastic.membership.topology import Place, StateVersion, World
from spark_elastic.wire import messages as wire
from spark_elastic.wire.channel import retry_pause_s
from spark_elastic.wire.encoding import decode, encode
from spark_elastic.wire.framing import Connection

VERSION = StateVersion(1, 5, 0)
PROBE_PORT = 7000
_BUFFER = bytearray(1 << 18)
"""Where the bytes of all connections arrive, one read at a time."""


@dataclass
class Shared:
    """What all peers of the process share: the settings, the messages that were read, and the counters."""

    key: bytes
    address: tuple[str, int]
    workers_a_host: int
    received: int = 0
    sent: int = 0
    refused: int = 0
    _read: dict[bytes, wire.Message] = field(default_factory=dict)
    _written: dict[wire.Message, bytes] = field(default_factory=dict)

    def decode(self, body: bytes) -> wire.Message:
        """Decode a message, once for all peers that receive the same bytes."""
        if body not in self._read:
            if len(self._read) > 256:
                self._read.clear()
            self._read[body] = decode(body)
        return self._read[body]

    def encode(self, message: wire.Message) -> bytes:
        """Encode a message, once for all peers that send the same; those are heartbeats."""
        if not isinstance(message, (wire.AgentHeartbeat, wire.WorkerHeartbeat)):
            return encode(message)
        if message not in self._written:
            if len(self._written) > 8192:
                self._written.clear()
            self._written[message] = encode(message)
        return self._written[message]


class Channel(asyncio.BufferedProtocol):
    """One authenticated connection to the driver."""

    def __init__(self, shared: Shared, on_message: Callable[[wire.Message], None]) -> None:
        self._shared = shared
        self._on_message = on_message
        self._connection = Connection(shared.key, server=False)
        self._transport: asyncio.Transport | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the connection is accepted or closed."""
        self.opened = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._connection.start())

    def get_buffer(self, sizehint: int) -> bytearray:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        assert self._transport is not None
        self._shared.received += nbytes
        bodies, reply = self._connection.receive(bytes(_BUFFER[:nbytes]))
        if reply:
            self._transport.write(reply)
        if self._connection.authenticated and not self.opened:
            self.opened = True
            self._settle()
        for body in bodies:
            self._on_message(self._shared.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._settle()

    def _settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

    def send(self, message: wire.Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            frame = self._connection.send(self._shared.encode(message))
            self._shared.sent += len(frame)
            self._transport.write(frame)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(shared: Shared, on_message: Callable[[wire.Message], None]) -> Channel:
    """Connect as `wire.channel.connect` does: again after a pause, until the driver has accepted the connection."""
    loop = asyncio.get_running_loop()
    while True:
        channel = Channel(shared, on_message)
        with contextlib.suppress(OSError):
            await loop.create_connection(lambda: channel, *shared.address)  # noqa: B023 (used before the next turn)
            await channel.settled
            if channel.opened:
                return channel
        shared.refused += 1
        await asyncio.sleep(retry_pause_s())


@dataclass(eq=False)
class Agent:
    """A simulated agent with its worker."""

    shared: Shared
    slot: int
    entered: Callable[[int, int], None]
    """Called with round and size when the worker holds a world and the addresses of its members."""
    channel: Channel | None = None
    worker: Channel | None = None
    worker_id: int = 0
    round: int = 0
    dead: bool = False
    _timers: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = self.slot // self.shared.workers_a_host
        number = self.host + 1
        self.address = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        self._own = os.urandom(100) + bytes(36)
        """What Gloo announces of this worker, the same in each world. As compact as an address with its padding."""
        self._next_number = 0
        """The number that Gloo's device here gives to its next connection."""

    async def run(self) -> None:
        place = Place(self.address, str(self.host), self.slot)
        addresses = {"lo": ("127.0.0.1",), "eth0": (self.address,)}
        hello = wire.AgentHello(place, 1, addresses, PROBE_PORT + self.slot, "")
        self.channel = await connect(self.shared, self._agent_said)
        self.channel.send(hello)

    def kill(self) -> None:
        """Close both connections, as the kernel does for processes that were killed."""
        self.dead = True
        for task in self._timers:
            task.cancel()
        for channel in (self.worker, self.channel):
            if channel is not None:
                channel.abort()

    def _agent_said(self, message: wire.Message) -> None:
        assert self.channel is not None
        match message:
            case wire.Welcome(interval_s):
                self._every(interval_s, self._agent_beat)
            case wire.StartWorkerProcess(worker):
                self.worker_id = worker
                self._timers.append(asyncio.create_task(self._start_worker()))
            case wire.ProbePeers(peers):
                reachable = tuple(peer for peer in peers if not peer.startswith("127."))
                self.channel.send(wire.PeersReachable(peers, reachable))
            case wire.FinishAgent():
                self.kill()

    async def _start_worker(self) -> None:
        self.worker = await connect(self.shared, self._worker_said)
        self.worker.send(wire.WorkerHello(self.worker_id))

    def _worker_said(self, message: wire.Message) -> None:
        match message:
            case wire.Welcome(interval_s):
                self._ready(None, at_init=True)
                self._every(interval_s, self._worker_beat)
            case wire.Provisional():
                self._ready(None, at_init=False)
            case wire.WorldAssigned(world):
                self._enter(world)
            case wire.KvGathered(round, _, values) if round == self.round:
                self.entered(round, len(values))
            case wire.Cut(round) if round == self.round:
                self._ready(VERSION, at_init=False)
            case wire.HostsUpdated():
                self._ready(VERSION, at_init=False)

    def _ready(self, version: StateVersion | None, *, at_init: bool) -> None:
        assert self.worker is not None
        self.worker.send(wire.Ready(self.round, version, at_init, 1))

    def _enter(self, world: World) -> None:
        """Send what a worker sends that connects in this world."""
        assert self.worker is not None
        numbers = struct.pack(f"<{world.size}Q", *range(self._next_number, self._next_number + world.size))
        self._next_number += world.size
        self.round = world.round
        value = json.dumps(["cpu", "", compact(self._own + numbers)])
        rank = world.member(self.worker_id).rank
        self.worker.send(wire.KvGather(world.round, "global", rank, world.size, value))
        if rank < 2:  # as `WorkerLink.report_version` does
            self._worker_beat()

    def _worker_beat(self) -> None:
        if self.worker is not None:
            version = VERSION if self.round else None
            self.worker.send(wire.WorkerHeartbeat(version, None, False, self.round))

    def _agent_beat(self) -> None:
        if self.channel is not None:
            self.channel.send(wire.AgentHeartbeat(self.worker_id or None))

    def _every(self, interval_s: float, beat: Callable[[], None]) -> None:
        async def run() -> None:
            await asyncio.sleep(random.uniform(0, interval_s))
            while not self.dead:
                beat()
                await asyncio.sleep(interval_s)

        self._timers.append(asyncio.create_task(run()))


class Fleet:
    """All agents of this process, and how many of them have entered the newest round."""

    def __init__(self, shared: Shared, say: Callable[[dict[str, Any]], None]) -> None:
        self._shared = shared
        self._say = say
        self._agents: dict[int, Agent] = {}
        self._round = 0
        self._entered = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, slots: list[int]) -> None:
        for slot in slots:
            agent = self._agents[slot] = Agent(self._shared, slot, self._in_world)
            self._tasks.append(asyncio.create_task(agent.run()))

    def kill(self, slot: int) -> None:
        if slot in self._agents:
            self._say({"killed": slot, "at": time.monotonic()})
            self._agents.pop(slot).kill()

    def _in_world(self, round: int, size: int) -> None:
        if round != self._round:
            self._round, self._entered = round, 0
        self._entered += 1
        if self._entered == len(self._agents):
            self._say({"round": round, "size": size, "entered": self._entered, "at": time.monotonic()})

    def report(self) -> None:
        shared = self._shared
        cpu_s = time.process_time()
        self._say({"received": shared.received, "sent": shared.sent, "refused": shared.refused, "cpu_s": cpu_s})

    def end(self) -> None:
        for agent in self._agents.values():
            agent.kill()


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    def say(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    first = json.loads(await reader.readline())
    shared = Shared(bytes.fromhex(first["key"]), tuple(first["address"]), first["workers_a_host"])
    fleet = Fleet(shared, say)
    while line := await reader.readline():
        command = json.loads(line)
        if "start" in command:
            fleet.start(command["start"])
        if "kill" in command:
            fleet.kill(command["kill"])
        if "report" in command:
            fleet.report()
    fleet.end()


if __name__ == "__main__":
    raise_descriptor_limit()
    asyncio.run(main())
