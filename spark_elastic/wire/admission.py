"""Admission: accepts connections so that unauthenticated peers cannot use up the process's descriptors or its log."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable

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
MAX_REASONS = 16  # reasons that are counted by themselves; some have numbers that the peer chooses
_OTHER_REASONS = "other reasons"
_BACKLOG = 4096
"""Connections that the kernel may keep until they are accepted; the others try again after a second or more."""
_AT_ONCE = 32  # connections that are accepted before the event loop serves other sockets again
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_handshakes(workers: int) -> int:
    """Return how many connections may be in their handshake at a time in a job of `workers` workers."""
    return max(MAX_UNAUTHENTICATED, 2 * workers)


class Admission:
    """The connections of a server from `accept` until they are authenticated or closed.

    At the limit it stops accepting, until a connection is authenticated or closed, or until the oldest one has been
    in its handshake for `IDLE_S` and is closed. So connections that are held open delay others only for a while.

    All methods must be called on the event loop's thread.

    Args:
        make_stream: Makes the stream of a connection. Its owner must call `settle` when it is authenticated or closed.
        most: Connections in their handshake at a time; fewer if the process may open few descriptors.
    """

    def __init__(self, make_stream: Callable[[], MessageStream], most: int = MAX_UNAUTHENTICATED) -> None:
        self._make_stream = make_stream
        self._most = min(most, max(1, (_descriptors_left() - RESERVED) // 2))
        self._sock: socket.socket | None = None
        self._listening = False
        self._since: dict[MessageStream, float] = {}
        """Connections in their handshake and when they were accepted; the oldest first."""
        self._opening: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._refusals = RefusalLog()

    def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket and take ownership of it."""
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        self._listen()

    def close(self) -> list[MessageStream]:
        """Stop listening. Returns the streams that are in their handshake."""
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
        """Record that a stream is authenticated or closed; `refused` is the reason if this side has closed it."""
        if refused:
            self._refusals.add(refused, stream.peer_address)
        if self._since.pop(stream, None) is not None and not self._listening:
            self._listen()

    # --- accepting --------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._cancel_resume()
        if self._sock is not None and not self._listening:
            self._listening = True
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _pause(self, seconds: float | None) -> None:
        """Stop accepting connections, for `seconds` or (None) for good."""
        if self._sock is not None and self._listening:
            self._listening = False
            asyncio.get_running_loop().remove_reader(self._sock)
        self._cancel_resume()
        if seconds is not None:
            self._resume = asyncio.get_running_loop().call_later(seconds, self._listen)

    def _cancel_resume(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None

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
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                self._shed(error)
                return
            connection.setblocking(False)
            stream = self._make_stream()
            self._since[stream] = clock.monotonic()
            task = asyncio.get_running_loop().create_task(self._open(stream, connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _make_room(self) -> bool:
        """Make room for one more connection. Returns False if there is none yet; accepting is paused until then."""
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
        """Close half of the connections in their handshake, because the process has no descriptor left."""
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
    """Logs refused connections: the first at once, the others in one line per `LOG_INTERVAL_S`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, why: str, address: str) -> None:
        known = why in self._counts or len(self._counts) < MAX_REASONS
        self._counts[why if known else _OTHER_REASONS] += 1
        self._last = address or self._last
        if self._timer is None:
            self._log()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._write()

    def _log(self) -> None:
        """Log the refusals since the last time, and again after a while; stop if there were none."""
        self._timer = None
        if self._counts:
            self._write()
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._log)

    def _write(self) -> None:
        if self._counts:
            logger.warning(
                "refused %d connections that did not authenticate, the last from %s (%s)",
                self._counts.total(),
                self._last or "an unknown address",
                "; ".join(f"{count}: {why}" for why, count in self._counts.items()),
            )
            self._counts.clear()


def _descriptors_left() -> int:
    """Return the number of files and connections that this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        return limit - len(os.listdir("/dev/fd"))
    except OSError:
        return limit // 2
