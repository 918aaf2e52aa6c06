"""Simulated agents and workers for control_plane.py: thousands in one process, on real connections to a real driver.

    python benchmarks/_simulated_peers.py < commands > events      (JSON, one object a line)

Each peer authenticates, sends its hello and its heartbeats, gets ready, receives worlds, exchanges addresses through
the driver's key-value store as Gloo does, and answers a cut by getting ready again. What a real worker computes on its
own machine (decoding the world, building the group) is done once for all peers of this process, so that this process
is not what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_elastic.membership.topology import Place, StateVersion
from spark_elastic.wire import messages as wire
from spark_elastic.wire.channel import retry_pause_s
from spark_elastic.wire.encoding import decode, encode
from spark_elastic.wire.framing import Connection

VERSION = StateVersion(1, 5, 0)
ADDRESS_BYTES = 36
"""Bytes that one member's address takes in Gloo's rendezvous, for each of the other members."""


class Shared:
    """What all peers of the process share: the decoded worlds, and the counters."""

    def __init__(self, key: bytes, address: tuple[str, int], workers_a_host: int, exchange: bool) -> None:
        self.key = key
        self.address = address
        self.workers_a_host = workers_a_host
        self.exchange = exchange
        self.received = 0
        self.sent = 0
        self.refused = 0
        self._bodies: dict[bytes, wire.Message] = {}

    def decode(self, body: bytes) -> wire.Message:
        """Decode a message; a large one that other peers received as well is decoded once."""
        if len(body) < 512:
            return decode(body)
        if body not in self._bodies:
            if len(self._bodies) > 8:
                self._bodies.clear()
            self._bodies[body] = decode(body)
        return self._bodies[body]


class Channel(asyncio.Protocol):
    """One authenticated connection to the driver."""

    def __init__(self, shared: Shared, on_open: Callable[[], None], on_message: Callable[[wire.Message], None]) -> None:
        self._shared = shared
        self._on_open = on_open
        self._on_message = on_message
        self._connection = Connection(shared.key, server=False)
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.opened = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._connection.start())

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._shared.received += len(data)
        bodies, reply = self._connection.receive(data)
        if reply:
            self._transport.write(reply)
        if self._connection.authenticated and not self.opened:
            self.opened = True
            self._on_open()
        for body in bodies:
            self._on_message(self._shared.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    def send(self, message: wire.Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            frame = self._connection.send(encode(message))
            self._shared.sent += len(frame)
            self._transport.write(frame)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(shared: Shared, on_open: Callable[[], None], on_message: Callable[[wire.Message], None]) -> Channel:
    """Connect as `wire.channel.connect` does: again after a pause, until the driver has accepted the connection."""
    loop = asyncio.get_running_loop()
    while True:
        channel = Channel(shared, on_open, on_message)
        try:
            await loop.create_connection(lambda: channel, *shared.address)  # noqa: B023 (used before the next turn)
        except OSError:
            shared.refused += 1
            await asyncio.sleep(retry_pause_s())
            continue
        while not channel.opened and not channel.closed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(channel.closed.wait(), 0.05)
        if channel.opened:
            return channel
        shared.refused += 1
        await asyncio.sleep(retry_pause_s())


@dataclass(eq=False)
class Agent:
    """A simulated agent with its worker."""

    shared: Shared
    slot: int
    in_world: Callable[[int, int], None]
    """Called with round and size when the worker has received a world and its peers' addresses."""
    channel: Channel | None = None
    worker: Channel | None = None
    worker_id: int = 0
    round: int = 0
    dead: bool = False
    _timers: list[asyncio.Task[None]] = field(default_factory=list)
    _requests: int = 0
    _size: int = 0

    async def run(self) -> None:
        host = f"host{self.slot // self.shared.workers_a_host}"
        place = Place(host, str(self.slot // self.shared.workers_a_host), self.slot)
        addresses = {"lo": ("127.0.0.1",), "eth0": (_ip(host),)}
        hello = wire.AgentHello(place, 1, os.getpid(), addresses, 0, "", 1, (), "3.11")
        self.channel = await connect(self.shared, lambda: None, self._agent_said)
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
        match message:
            case wire.AgentWelcome(interval_s, _):
                self._every(interval_s, self._agent_beat)
            case wire.StartWorkerProcess(worker):
                self.worker_id = worker
                self._timers.append(asyncio.create_task(self._start_worker()))
            case wire.FinishAgent():
                self.kill()

    async def _start_worker(self) -> None:
        self.worker = await connect(self.shared, lambda: None, self._worker_said)
        self.worker.send(wire.WorkerHello(self.worker_id, os.getpid()))

    def _worker_said(self, message: wire.Message) -> None:
        assert self.worker is not None
        match message:
            case wire.WorkerWelcome(interval_s, _, _):
                self.worker.send(wire.Ready(0, None, True, 1, None))
                self._every(interval_s, self._worker_beat)
            case wire.Provisional():
                self.worker.send(wire.Ready(0, None, False, 1, None))
            case wire.WorldAssigned():
                self._enter(message)
            case wire.KvValues():
                self._entered()
            case wire.Cut(round) if round == self.round:
                self._ready_again()
            case wire.HostsUpdated():
                self._ready_again()

    def _enter(self, assigned: wire.WorldAssigned) -> None:
        world = assigned.world
        self.round, self._size = world.round, world.size
        if not self.shared.exchange or world.size == 1:
            self._entered()
            return
        assert self.worker is not None
        rank = world.member(self.worker_id).rank
        self.worker.send(wire.KvSet(self.round, f"world/0/{rank}", bytes(ADDRESS_BYTES * world.size)))
        keys = _keys(world.size, rank)
        self._requests += 1
        self.worker.send(wire.KvGet(self.round, self._requests, keys))

    def _entered(self) -> None:
        self.in_world(self.round, self._size)
        self._worker_beat()

    def _ready_again(self) -> None:
        assert self.worker is not None
        self.worker.send(wire.Ready(self.round, VERSION, False, 1, None))

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


_key_cache: dict[int, tuple[str, ...]] = {}


def _keys(size: int, rank: int) -> tuple[str, ...]:
    if size not in _key_cache:
        _key_cache.clear()
        _key_cache[size] = tuple(f"world/0/{each}" for each in range(size))
    return _key_cache[size]


def _ip(host: str) -> str:
    number = int(host.removeprefix("host")) + 1
    return f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"


class Fleet:
    """All agents of this process, and the rounds that they have entered."""

    def __init__(self, shared: Shared, say: Callable[[dict[str, Any]], None]) -> None:
        self._shared = shared
        self._say = say
        self._agents: dict[int, Agent] = {}
        self._entered: dict[int, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, slots: list[int]) -> None:
        for slot in slots:
            agent = self._agents[slot] = Agent(self._shared, slot, self._in_world)
            self._tasks.append(asyncio.create_task(agent.run()))

    def kill(self, slot: int) -> None:
        self._say({"killed": slot, "at": time.monotonic()})
        self._agents.pop(slot).kill()

    def _in_world(self, round: int, size: int) -> None:
        self._entered[round] = self._entered.get(round, 0) + 1
        if self._entered[round] in (1, len(self._agents)):
            self._say({"round": round, "size": size, "entered": self._entered[round], "at": time.monotonic()})

    def report(self) -> None:
        shared = self._shared
        cpu_s = time.process_time()
        self._say({"received": shared.received, "sent": shared.sent, "refused": shared.refused, "cpu_s": cpu_s})

    def end(self) -> None:
        for agent in self._agents.values():
            agent.kill()


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    def say(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    first = json.loads(await reader.readline())
    shared = Shared(bytes.fromhex(first["key"]), tuple(first["address"]), first["workers_a_host"], first["exchange"])
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
    asyncio.run(main())
