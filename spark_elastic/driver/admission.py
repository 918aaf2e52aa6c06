"""Admission: accepts connections without letting strangers take the process's descriptors, or fill its log."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable

from spark_elastic import clock
from spark_elastic.wire.stream import MessageStream

logger = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 256
"""Connections that may be in their handshake at a time: a whole gang may come at once. Further ones wait in the
listening socket's queue, which costs no descriptor."""
IDLE_S = 0.25
"""A connection that is in its handshake for so long gives its place to a waiting one. A real peer needs milliseconds,
and tries again if that happened to it on a busy machine."""
RESERVED = 128
"""Descriptors that connections in their handshake leave to the rest of the process, if the limit is that low."""
LOG_INTERVAL_S = 60.0
_BACKLOG = 1024
_AT_ONCE = 32
"""Connections that are accepted before the others are served again."""
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Admission:
    """The door of a server: connections from `accept` until they are authenticated or closed.

    At the limit it stops accepting. It goes on when a connection has proved itself or was closed, or when the oldest
    one has idled for `IDLE_S` and gives its place away: so connections that are held open cost the others at most
    the time that the queue before them takes.

    All calls on the loop's thread.

    Args:
        make: makes the stream of a connection; it has to tell `settle` when the stream is authenticated or closed.
        most: connections in their handshake at a time. Fewer if the process may open few descriptors.
    """

    def __init__(self, make: Callable[[], MessageStream], most: int = MAX_UNAUTHENTICATED) -> None:
        self._make = make
        self._most = min(most, max(1, (_descriptors_left() - RESERVED) // 2))
        self._sock: socket.socket | None = None
        self._listening = False
        self._since: dict[MessageStream, float] = {}  # oldest first
        self._opening: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._refusals = RefusalLog()

    def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket, which belongs to this object from now on."""
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        self._listen()

    def close(self) -> list[MessageStream]:
        """Stop listening. Returns: the streams that are in their handshake."""
        self._pause(None)
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for task in self._opening:
            task.cancel()
        self._refusals.close()
        streams = list(self._since)
        self._since.clear()
        return streams

    def settle(self, stream: MessageStream, refused: str = "") -> None:
        """The stream is authenticated, or closed; refused: why it was closed by this side."""
        if refused:
            self._refusals.add(refused, stream.peer_address)
        if self._since.pop(stream, None) is not None and not self._listening:
            self._listen()

    # --- accepting --------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._sock is not None and not self._listening:
            self._listening = True
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _pause(self, seconds: float | None) -> None:
        if self._sock is not None and self._listening:
            self._listening = False
            asyncio.get_running_loop().remove_reader(self._sock)
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if seconds is not None:
            self._resume = asyncio.get_running_loop().call_later(seconds, self._listen)

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(_AT_ONCE):
            if not self._make_room():
                return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._shed(error)
                return
            connection.setblocking(False)
            stream = self._make()
            self._since[stream] = clock.monotonic()
            task = asyncio.get_running_loop().create_task(self._open(stream, connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _make_room(self) -> bool:
        """Have a place for one more connection; False: there is none yet, and accepting is paused until then."""
        if len(self._since) < self._most:
            return True
        oldest, since = next(iter(self._since.items()))
        left = since + IDLE_S - clock.monotonic()
        if left > 0:
            self._pause(left)
            return False
        self._displace(oldest)
        return True

    def _displace(self, stream: MessageStream) -> None:
        self._since.pop(stream, None)
        self._refusals.add("they did not authenticate while others waited", stream.peer_address)
        stream.abort("the peer did not authenticate while others waited")

    def _shed(self, error: OSError) -> None:
        """The process has no descriptor left: give back those of half of the connections in their handshake."""
        self._refusals.add(f"the process has no descriptors left ({error.strerror})", "")
        for stream in list(self._since)[: (len(self._since) + 1) // 2]:
            self._displace(stream)
        self._pause(IDLE_S)

    async def _open(self, stream: MessageStream, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, connection)
        except BaseException as error:
            connection.close()
            self.settle(stream)
            if not isinstance(error, OSError):
                raise


class RefusalLog:
    """Logs refused connections: the first at once, and then one line for each `LOG_INTERVAL_S` that has any."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, why: str, address: str) -> None:
        self._counts[why] = self._counts.get(why, 0) + 1
        self._last = address or self._last
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._counts:
            self._write()

    def _tell(self) -> None:
        self._timer = None
        if self._counts:
            self._write()
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._tell)

    def _write(self) -> None:
        counts, self._counts = self._counts, {}
        reasons = "; ".join(f"{count}: {why}" for why, count in counts.items())
        logger.warning(
            "refused %d connections that did not authenticate, the last from %s (%s)",
            sum(counts.values()),
            self._last or "an unknown address",
            reasons,
        )


def _descriptors_left() -> int:
    """Return how many files and connections this process may open from here on."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        return limit - len(os.listdir("/dev/fd"))
    except OSError:
        return limit // 2
