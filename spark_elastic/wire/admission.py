"""Admission: accepts connections so that unauthenticated peers cannot use up the process's descriptors or its log."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import socket
from collections.abc import Callable, Coroutine

from spark_elastic import clock
from spark_elastic.wire.channel import MessageStream

logger = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 256
"""Connections that may be in their handshake at a time, in a job of up to half as many workers: all agents may come at
once, and all workers after them. Further ones wait in the listening socket's queue, which costs no descriptor."""
IDLE_S = 0.25
"""A connection whose handshake has taken longer is closed if another connection waits. A real peer needs milliseconds,
and connects again if this happens to it on a busy machine."""
RESERVED = 128  # descriptors that are kept for the rest of the process if its limit is low
LOG_INTERVAL_S = 60.0
_BACKLOG = 4096  # connections that the kernel keeps until they are accepted; others try again after a second or more
_AT_ONCE = 32  # connections that are accepted before the event loop serves other sockets again


class Admission:
    """The connections of a server from `accept` until they are authenticated or closed; used on the loop's thread only.

    At the limit (`most` in their handshake, fewer if the process may open few descriptors) it stops accepting, until a
    connection is authenticated or closed, or until the oldest one has been in its handshake for `IDLE_S` and is closed.
    So connections that are held open delay others only for a while. The owner of a stream calls `settle` when it is
    authenticated or closed.
    """

    def __init__(self, make_stream: Callable[[], MessageStream], most: int = MAX_UNAUTHENTICATED) -> None:
        self._make_stream = make_stream
        self._most = min(most, max(1, (_descriptors_left() - RESERVED) // 2))
        self._sock: socket.socket | None = None
        #: Connections in their handshake and when they were accepted; the oldest first.
        self._since: dict[MessageStream, float] = {}
        self._settled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = 0  # connections since the last line about them
        self._last_refusal = "", ""  # why, and the address
        self._logged_at = float("-inf")

    def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket and take ownership of it."""
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        self._run(self._accept_always(sock))

    def close(self) -> list[MessageStream]:
        """Stop listening. Returns the streams that are in their handshake."""
        for task in self._tasks:
            task.cancel()
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        if self._refused:
            self._log_refusals()
        streams = list(self._since)
        self._since.clear()
        return streams

    def settle(self, stream: MessageStream, refused: str = "") -> None:
        """Record that a stream is authenticated or closed; `refused` is the reason if this side has closed it."""
        if refused:
            self._refuse(refused, stream.peer_address)
        if self._since.pop(stream, None) is not None:
            self._settled.set()

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_always(self, sock: socket.socket) -> None:
        while True:
            try:
                await self._accept(sock)
            except Exception as error:  # for example of a handler of the log; without this task nobody could join
                about = {"message": "accepting connections failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(about)
                await asyncio.sleep(IDLE_S)

    async def _accept(self, sock: socket.socket) -> None:
        for number in itertools.count(1):
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # usually the process has no descriptor left: half of the handshakes are closed
                self._refuse(f"the system accepts none: {error.strerror}", "")
                for stream in list(self._since)[: (len(self._since) + 1) // 2]:
                    self._displace(stream)
                await asyncio.sleep(IDLE_S)
                continue
            try:
                await self._make_room()
            except asyncio.CancelledError:
                connection.close()
                raise
            stream = self._make_stream()
            self._since[stream] = clock.monotonic()
            self._run(self._open(stream, connection))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _make_room(self) -> None:
        """Wait until there is room for one more connection: one is settled, or the oldest may be closed."""
        while len(self._since) >= self._most:
            oldest, since = next(iter(self._since.items()))
            left = since + IDLE_S - clock.monotonic()
            if left <= 0:
                self._displace(oldest)
                return
            self._settled.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._settled.wait(), left)

    def _displace(self, stream: MessageStream) -> None:
        self._since.pop(stream, None)
        self._refuse("they did not authenticate while others waited", stream.peer_address)
        stream.abort("the peer did not authenticate while others waited")

    async def _open(self, stream: MessageStream, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, connection)
        except BaseException as error:
            connection.close()
            self.settle(stream)
            if not isinstance(error, OSError):
                raise

    def _refuse(self, why: str, address: str) -> None:
        """Count a refused connection. The first is logged at once, later ones in one line per `LOG_INTERVAL_S`."""
        self._refused += 1
        self._last_refusal = why, address or "an unknown address"
        if clock.monotonic() >= self._logged_at + LOG_INTERVAL_S:
            self._log_refusals()

    def _log_refusals(self) -> None:
        why, address = self._last_refusal
        problem = "refused %d connections that did not authenticate, the last from %s (%s)"
        logger.warning(problem, self._refused, address, why)
        self._refused, self._logged_at = 0, clock.monotonic()


def _descriptors_left() -> int:
    """Return the number of files and connections that this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        return limit - len(os.listdir("/dev/fd"))
    except OSError:
        return limit // 2
