"""The worker's side of `worlds`: its link to the test's driver, and what a function in a worker can do."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from spark_elastic.errors import HorovodInternalError
from spark_elastic.membership.topology import StateVersion
from spark_elastic.task.generated_code import keep_generated_code_in_memory
from spark_elastic.wire import worker_link
from spark_elastic.wire.messages import Provisional
from spark_elastic.wire.worker_link import Assignment

STALL_TIMEOUT_S = 7200.0


class WorldLink:
    """A `WorkerLink` over a connection to a `WorldDriver`."""

    restarts_world = False

    def __init__(self, connection: Connection, worker: int) -> None:
        self.worker = worker
        self.version: StateVersion | None = None
        self._connection = connection
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._assignments: list[Any] = []
        self._newest: Assignment | None = None
        self._values: dict[int, bytes] = {}
        self._requests = 0
        self._updates = 0
        self._cut = (0, "")
        self.on_cut: Callable[[int, str], object] = lambda round, why: None
        threading.Thread(target=self._read, name="world-link", daemon=True).start()

    def send(self, *message: Any) -> None:
        with self._send_lock:
            self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                kind, *rest = self._connection.recv()
                with self._changed:
                    if kind == "world":
                        world, addresses = rest
                        self._assignments.append(Assignment(world, self.worker, addresses, self._updates))
                    elif kind == "provisional":
                        self._assignments.append(Provisional(*rest, loop=1))
                    elif kind == "updated":
                        self._updates = rest[0]
                    elif kind == "cut":
                        self._cut = (rest[0], rest[1])
                    elif kind == "values":
                        self._values[rest[0]] = rest[1]
                    self._changed.notify_all()
                if kind == "cut":
                    self.on_cut(*self._cut)
        except (EOFError, OSError):
            self.driver_gone()

    def driver_gone(self) -> None:
        os._exit(7)  # and so are we

    def _next(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._assignments)
            answer = self._assignments.pop(0)
            self._newest = answer if isinstance(answer, Assignment) else self._newest
            return answer

    def _ready(self, round: int, version: StateVersion | None, at_init: bool) -> None:
        self.send("ready", round, version, at_init)

    def join_at_init(self) -> Any:
        if self._newest is not None:
            return self._newest  # as the real one: who is in a world is still in it after `shutdown`
        self._ready(0, None, True)
        return self._next()

    def join(
        self, round: int, version: StateVersion | None, loop: int = 1, meanwhile: Callable[[], None] | None = None
    ) -> Assignment:
        self._ready(round, version, False)
        if meanwhile is not None:
            meanwhile()
        answer = self._next()
        assert isinstance(answer, Assignment)
        return answer

    def report_version(self, version: StateVersion) -> None:
        self.version = version

    def entered_loop(self) -> None:
        pass

    def left_loop(self) -> None:
        pass

    def offer_loop_result(self, loop: int, problem: str, result: bytes) -> None:
        pass

    def loop_result(self, loop: int, timeout_s: float) -> tuple[str, bytes]:
        raise NotImplementedError

    def blocked(self, waiting: bool) -> None:
        pass

    @property
    def stall_timeout_s(self) -> float:
        return STALL_TIMEOUT_S

    def updates_seen(self) -> int:
        return self._updates

    def check_cut(self, round: int) -> None:
        if self._cut[0] >= round:
            raise HorovodInternalError(f"round {round} was cut: {self._cut[1]}")

    def derive_key(self, purpose: str) -> bytes:
        return hmac.digest(b"the key of this test", purpose.encode(), hashlib.sha256)

    def show(self, what: Any) -> bool:
        return True

    def gather(self, round: int, name: str, rank: int, size: int, value: str, timeout_s: float) -> list[str]:
        self.kv_set(round, f"gather/{name}/{rank}", value.encode())
        return [self.kv_get(round, f"gather/{name}/{each}", timeout_s).decode() for each in range(size)]

    def kv_set(self, round: int, key: str, value: bytes) -> None:
        self.send("set", round, key, value)

    def kv_get(self, round: int, key: str, timeout_s: float) -> bytes:
        with self._changed:
            self._requests += 1
            request = self._requests
        self.send("get", round, request, key)
        with self._changed:
            done = self._changed.wait_for(lambda: request in self._values or self._cut[0] >= round, timeout_s)
            if request in self._values:
                return self._values.pop(request)
        if done:
            raise HorovodInternalError(f"round {round} was cut: {self._cut[1]}")
        raise TimeoutError(f"{key} was not set within {timeout_s} s")


def link() -> WorldLink:
    """The link of this worker process."""
    current = worker_link.current()
    assert isinstance(current, WorldLink)
    return current


def tell(name: str, value: Any = None) -> None:
    """Tell the test something."""
    link().send("event", name, value)


def die() -> None:
    """End this process as the kernel ends one."""
    os.kill(os.getpid(), signal.SIGKILL)


def worker_main(address: str, worker: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    if "tensorflow" in sys.modules:
        keep_generated_code_in_memory()  # the driver kills us
    connection = Client(address, family="AF_UNIX")
    own = WorldLink(connection, worker)
    worker_link.install(own)
    own.send("hello", worker)
    try:
        result = function(*args)
    except BaseException:  # the test shows it
        own.send("raised", traceback.format_exc())
    else:
        own.send("done", result)
    worker_link.install(None)
    with own._changed:
        own._changed.wait()  # the driver ends us, so that a peer still finds our sockets open
