"""Real processes with real Gloo between them, under a driver of a hundred lines: for tests and measurements.

The driver decides as little as possible: who is connected, who is ready, who is root. A worker is a process that a
fork server has forked off, so it starts in milliseconds with torch imported; the server itself never touches Gloo.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from spark_elastic.membership.topology import Member, Place, StateVersion, World
from tests.unit.world_link import worker_main

WAIT_S = 60.0
"""A test fails when nothing at all has happened for so long, while it waits for something."""
LONGEST_WAIT_S = 300.0

_context = mp.get_context("forkserver")


def preloaded() -> list[str]:
    """Return what the fork server imports: TensorFlow takes seconds, and this process has it if its tests need it."""
    # torch._dynamo: the first optimizer of a process imports it, which takes longer than everything else here
    torch = ["torch", "torch._dynamo", "spark_elastic.torch", "spark_elastic.torch.elastic", "spark_elastic.ml.torch"]
    # importing TensorFlow starts nothing that a fork would lose; its first operation does
    keras = ["tensorflow", "keras", "spark_elastic.tensorflow", "spark_elastic.keras", "spark_elastic.ml.keras"]
    return [*torch, *(keras if "tensorflow" in sys.modules else []), "pytest", "psutil"]


@dataclass
class _Peer:
    worker: int
    process: Any
    connection: Connection | None = None
    ready: tuple[int, int | None, bool] | None = None
    joined: bool = False
    """It is, or waits to be, a member: it is not a newcomer in its init."""


@dataclass
class WorldDriver:
    """Starts workers, publishes worlds, cuts them. Use as a context manager; leaving it kills every worker."""

    hosts: Sequence[str] = ("127.0.0.1",)
    """Workers are put on these in turn."""
    start_with: int = 1
    world: World | None = None
    done: dict[int, Any] = field(default_factory=dict)
    raised: list[str] = field(default_factory=list)
    events: list[tuple[int, str, Any]] = field(default_factory=list)
    worlds: list[World] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._peers: dict[int, _Peer] = {}
        self._evicted: set[int] = set()
        self._next_worker = 1
        self._changed = threading.Condition()
        self._values: dict[tuple[int, str], bytes] = {}
        self._gets: list[tuple[_Peer, int, int, str]] = []
        self._broken = False
        self._updates = 0
        self._over = False
        self._listener = Listener(family="AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> WorldDriver:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.process.kill()
            peer.process.join()
            if peer.connection is not None:
                peer.connection.close()
        # a blocked accept() is not woken by close()
        try:
            Client(self._listener.address, family="AF_UNIX").close()
        except OSError:
            pass
        self._listener.close()

    def start(self, function: Callable[..., Any], *args: Any, count: int = 1) -> list[int]:
        """Start workers that call the function; returns their ids."""
        _context.set_forkserver_preload(preloaded())  # read when the server starts, with the first process
        out = []
        for _ in range(count):
            with self._changed:
                worker = self._next_worker
                self._next_worker += 1
            process = _context.Process(
                target=worker_main, args=(self._listener.address, worker, function, args), daemon=True
            )
            with self._changed:
                self._peers[worker] = _Peer(worker, process)
            process.start()
            out.append(worker)
        return out

    def kill(self, worker: int, how: int = signal.SIGKILL) -> None:
        os.kill(self._peers[worker].process.pid, how)

    def evict(self, worker: int) -> None:
        """Treat the worker as lost, though its process and its sockets are there: a hang, as heartbeats find it."""
        with self._changed:
            self._evicted.add(worker)
            self._lost(self._peers[worker])
            self._changed.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        """Block until the condition holds; it is looked at whenever anything has happened."""
        until = time.monotonic() + LONGEST_WAIT_S
        with self._changed:
            while not condition() and not self.raised:
                happened = self._changed.wait(WAIT_S) and time.monotonic() < until
                assert happened or condition(), f"still waiting; world {self.world}, events {self.events[-5:]}"
        if self.raised:
            raise AssertionError("a worker raised:\n" + "\n".join(self.raised))

    def results(self, count: int) -> list[Any]:
        """What the first `count` workers that finish return, in the order of their ids."""
        self.wait(lambda: len(self.done) >= count)
        return [self.done[worker] for worker in sorted(self.done)]

    def told(self, name: str) -> list[Any]:
        return [value for _, event, value in self.events if event == name]

    # --- decisions, all under the lock ----------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            if self._over:
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        peer: _Peer | None = None
        try:
            while True:
                message = connection.recv()
                with self._changed:
                    if message[0] == "hello":
                        peer = self._peers[message[1]]
                        peer.connection = connection
                    else:
                        assert peer is not None
                        self._handle(peer, *message)
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                if peer is not None:
                    peer.connection = None
                    self._lost(peer)
                self._changed.notify_all()

    def _handle(self, peer: _Peer, kind: str, *rest: Any) -> None:
        if kind == "ready":
            self._ready(peer, *rest)
        elif kind == "set":
            self._values[rest[0], rest[1]] = rest[2]
            self._answer_gets()
        elif kind == "get":
            self._gets.append((peer, *rest))
            self._answer_gets()
        elif kind == "event":
            self.events.append((peer.worker, *rest))
        elif kind == "done":
            self.done[peer.worker] = rest[0]
            self._publish_if_ready()
        elif kind == "raised":
            self.raised.append(rest[0])

    def _answer_gets(self) -> None:
        waiting = []
        for peer, round, request, key in self._gets:
            if (round, key) in self._values:
                self._send(peer, "values", request, self._values[round, key])
            else:
                waiting.append((peer, round, request, key))
        self._gets = waiting

    def _send(self, peer: _Peer, *message: Any) -> None:
        if peer.connection is not None:
            try:
                peer.connection.send(message)
            except OSError:
                pass

    def _members(self) -> list[_Peer]:
        if self.world is None:
            return []
        gone = self._evicted | self.done.keys()
        return [self._peers[m.worker] for m in self.world.members if m.worker not in gone]

    def _ready(self, peer: _Peer, round: int, version: StateVersion | None, at_init: bool) -> None:
        if at_init and self.world is not None:
            self._send(peer, "provisional", self.world.size, self.world.size + 1)
            return
        peer.ready, peer.joined = (round, version, at_init), True
        if self.world is not None and not self._broken and self._updates_due():
            self._updates += 1
            for member in self._members():
                self._send(member, "updated", self._updates)
        self._publish_if_ready()

    def _updates_due(self) -> bool:
        members = self._members()
        return not any(member.ready for member in members)

    def _lost(self, peer: _Peer) -> None:
        if self._over or peer.worker in self.done:
            return
        if self.world is not None and peer.worker in self.world.workers:
            self._broken = True
            for member in self._members():
                self._send(member, "cut", self.world.round, f"worker {peer.worker} is gone")
        self._publish_if_ready()

    def _publish_if_ready(self) -> None:
        waiting = [
            p for p in self._peers.values() if p.ready and p.connection is not None and p.worker not in self.done
        ]
        if self.world is None:
            if len(waiting) < self.start_with:
                return
        elif not waiting or any(not m.ready for m in self._members() if m.connection is not None):
            return
        old = {m.worker: m.rank for m in self.world.members} if self.world is not None else {}
        order = sorted(waiting, key=lambda p: (self._host(p), old.get(p.worker, 1 << 30), p.worker))
        self._publish(order)

    def _host(self, peer: _Peer) -> int:
        return (peer.worker - 1) % len(self.hosts)

    def _publish(self, order: list[_Peer]) -> None:
        versions = [p.ready[1] for p in order if p.ready is not None]
        held = [p for p in versions if p is not None]
        best = max(held, default=None)
        root = versions.index(best)
        round = (self.world.round if self.world is not None else 0) + 1
        by_host: dict[int, list[_Peer]] = {}
        for peer in order:
            by_host.setdefault(self._host(peer), []).append(peer)
        members = []
        for rank, peer in enumerate(order):
            host = self._host(peer)
            local = by_host[host].index(peer)
            across = [h for h, peers in by_host.items() if len(peers) > local]
            place = Place(self.hosts[host], str(peer.worker), peer.worker)
            members.append(Member(peer.worker, place, rank, local, len(by_host[host]), across.index(host), len(across)))
        sync = len(held) < len(order) or len(set(held)) > 1
        self.world = World(round, tuple(members), root, best, sync)
        self.worlds.append(self.world)
        self._broken = False
        addresses = tuple(m.place.host for m in members)
        for peer in order:
            peer.ready = None
        for peer in order:
            self._send(peer, "world", self.world, addresses)


def together(
    function: Callable[..., Any], *args: Any, count: int = 2, left: int | None = None, **options: Any
) -> list[Any]:
    """Return the results of workers in one world that call the function; `left`: how many outlive it, not all."""
    with WorldDriver(start_with=count, **options) as driver:
        driver.start(function, *args, count=count)
        return driver.results(left or count)


def joined(function: Callable[..., Any], *args: Any, count: int = 2, told: str = "in loop", more: int = 1) -> list[Any]:
    """Return the results of workers to whose world others come once all have told so; all call the function."""
    with WorldDriver(start_with=count) as driver:
        driver.start(function, *args, count=count)
        driver.wait(lambda: len(driver.told(told)) >= count)
        driver.start(function, *args, count=more)
        return driver.results(count + more)
