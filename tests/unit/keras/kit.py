"""Worlds of real processes that train with Keras, under the driver of `tests.unit.torch.kit`.

To import TensorFlow takes seconds, and a process that has imported it must not be forked. So the processes are spawned
and used again: one that has come to the end of its function waits for the next test. One that was killed is replaced
in the background.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import socket
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

from spark_elastic import worker_link
from tests.unit.torch.kit import KitDriver, KitLink, _Peer

_context = mp.get_context("spawn")
WARM = 3
"""Processes that are kept ready."""


# --- the worker's side ----------------------------------------------------------------------------


class ReusableLink(KitLink):
    """A link whose process outlives its driver."""

    def __init__(self, connection: Connection, worker: int) -> None:
        self.over = threading.Event()
        super().__init__(connection, worker)

    def driver_gone(self) -> None:
        self.over.set()


def _serve(orders: Connection, backend: str) -> None:
    os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")  # shown if a test fails
    import torch

    torch.set_num_threads(1)
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    import keras

    import spark_elastic.keras as hvd
    from spark_elastic.collective.process import process

    orders.send("ready")
    while True:
        try:
            address, worker, function, args = orders.recv()
        except EOFError:
            return
        link = ReusableLink(Client(address, family="AF_UNIX"), worker)
        worker_link.install(link)
        link.send("hello", worker)
        try:
            result = function(*args)
        except BaseException:  # the test shows it
            link.send("raised", traceback.format_exc())
        else:
            link.send("done", result)
        link.over.wait()  # until then a peer still finds our sockets open
        hvd.shutdown()
        process._connections.clear()  # another driver counts its rounds from 1 again
        worker_link.install(None)
        keras.backend.clear_session()
        orders.send("free")


# --- the test's side ------------------------------------------------------------------------------


class _Warm:
    def __init__(self, backend: str) -> None:
        self.orders, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, backend), daemon=True)
        self.process.start()
        theirs.close()

    def expect(self, word: str) -> None:
        assert self.orders.recv() == word

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.orders.close()


class Pool:
    """Processes in which Keras has been imported."""

    def __init__(self, backend: str = "tensorflow", warm: int = WARM) -> None:
        self._backend = backend
        self._starting = [_Warm(backend) for _ in range(warm)]
        self._free: list[_Warm] = []

    def take(self) -> _Warm:
        if self._free:
            return self._free.pop()
        if not self._starting:
            self._starting.append(_Warm(self._backend))
        warm = self._starting.pop(0)
        warm.expect("ready")
        return warm

    def give_back(self, warm: _Warm) -> None:
        warm.expect("free")
        self._free.append(warm)

    def replace(self, warm: _Warm) -> None:
        warm.end()
        self._starting.append(_Warm(self._backend))

    def close(self) -> None:
        for warm in self._free + self._starting:
            warm.end()


_pools: dict[str, Pool] = {}


def pool(backend: str = "tensorflow", warm: int = WARM) -> Pool:
    if backend not in _pools:
        _pools[backend] = Pool(backend, warm)
    return _pools[backend]


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


class KerasDriver(KitDriver):
    """A `KitDriver` whose workers come from a pool and go back to it."""

    backend = "tensorflow"

    def start(self, function: Callable[..., Any], *args: Any, count: int = 1) -> list[int]:
        out = []
        for _ in range(count):
            warm = pool(self.backend).take()
            with self._changed:
                worker = self._next_worker
                self._next_worker += 1
                peer = _Peer(worker, warm.process)
                peer.warm = warm  # type: ignore[attr-defined]
                self._peers[worker] = peer
            warm.orders.send((self._listener.address, worker, function, args))
            out.append(worker)
        return out

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            peers = list(self._peers.values())
        for peer in peers:
            if peer.worker not in self.done or not peer.process.is_alive():
                pool(self.backend).replace(peer.warm)  # type: ignore[attr-defined]
            if peer.connection is not None:
                # shutdown, not close: the thread that reads here would keep the descriptor open
                socket.socket(fileno=os.dup(peer.connection.fileno())).shutdown(socket.SHUT_RDWR)
        for peer in peers:
            if peer.worker in self.done and peer.process.is_alive():
                pool(self.backend).give_back(peer.warm)  # type: ignore[attr-defined]
        for peer in peers:
            if peer.connection is not None:
                peer.connection.close()
        try:  # a blocked accept() is not woken by close()
            Client(self._listener.address, family="AF_UNIX").close()
        except OSError:
            pass
        self._listener.close()
