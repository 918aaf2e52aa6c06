"""ProbePort: where other agents try whether they can reach this one."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterable

logger = logging.getLogger(__name__)

_BACKLOG = 64
_AT_ONCE = 16
_PAUSE_S = 0.1
"""After so many connections. A flood costs next to nothing then, and probes wait in the queue."""
_TRIES = 20


class ProbePort:
    """Accepts connections on one port of the given addresses, and closes each at once: no descriptor stays in use.

    Other agents connect to it to find out which addresses carry traffic. All calls on the loop's thread.

    Args:
        addresses: IPv4 addresses of this host; those that cannot be listened on are left out.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._sockets = _bound(list(dict.fromkeys(addresses)))
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        for sock in self._sockets:
            self._listen(sock)

    @property
    def port(self) -> int:
        """The port's number; 0: there is no address to listen on, and nobody should try."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else 0

    def close(self) -> None:
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        for timer in self._paused.values():
            timer.cancel()
        self._sockets = []
        self._paused.clear()

    def _listen(self, sock: socket.socket) -> None:
        self._paused.pop(sock, None)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left, say
                logger.debug("cannot accept a probe: %s", error)
                break
            connection.close()
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        self._paused[sock] = loop.call_later(_PAUSE_S, self._listen, sock)


def _bound(addresses: list[str]) -> list[socket.socket]:
    """Listening sockets on one port of as many of the addresses as possible."""
    for _ in range(_TRIES):
        sockets: list[socket.socket] = []
        taken = False
        for address in addresses:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.bind((address, sockets[0].getsockname()[1] if sockets else 0))
                sock.listen(_BACKLOG)
            except OSError as error:
                sock.close()
                taken = error.errno == errno.EADDRINUSE
                if taken:
                    break
                logger.debug("cannot listen for probes on %s: %s", address, error)
            else:
                sockets.append(sock)
        if not taken:
            return sockets
        for sock in sockets:
            sock.close()
    return []
