"""The TCP sockets under a Gloo group: Gloo owns them and has no call that interrupts a blocked collective.

`shutdown()` of its sockets does, within a millisecond. It is called from another thread than the one that uses or
closes the group, so it goes through duplicates of the descriptors: the number of a closed descriptor may by then belong
to something else, a duplicate's cannot.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Collection, Sequence

_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


def open_descriptors() -> frozenset[int]:
    """The numbers of all open descriptors of this process, without that of the listing itself: it is free again."""
    return frozenset(number for number in map(int, os.listdir(_DESCRIPTORS)) if _is_open(number))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class GroupSockets:
    """Duplicates of the connections of one group.

    Args:
        before: the descriptors that were open before the group was made.
        addresses: of its members.
        announced: what the members told each other in the rendezvous, each with its listener's port somewhere in it.
    """

    def __init__(self, before: Collection[int], addresses: Collection[str], announced: Sequence[bytes]) -> None:
        self._lock = threading.Lock()
        self.descriptors: list[int] = []
        """Gloo's own, for a forked child to close: it must not hold its parent's connections open."""
        self._duplicates: list[socket.socket] = []
        for descriptor in sorted(open_descriptors() - frozenset(before)):
            duplicate = _connection(descriptor)
            if duplicate is None:
                continue
            if _belongs(duplicate, addresses, announced):
                self.descriptors.append(descriptor)
                self._duplicates.append(duplicate)
            else:
                duplicate.close()

    def __len__(self) -> int:
        return len(self._duplicates)

    def shutdown(self) -> None:
        """End every connection; whoever is blocked on one gets an error. May be called from any thread, repeatedly."""
        with self._lock:
            for duplicate in self._duplicates:
                try:
                    duplicate.shutdown(socket.SHUT_RDWR)
                except OSError:  # the peer was faster
                    pass

    def close(self) -> None:
        """Give the duplicates back; the connections themselves are Gloo's to close."""
        with self._lock:
            for duplicate in self._duplicates:
                duplicate.close()
            self._duplicates.clear()

    def close_in_child(self) -> None:
        """In a forked child: close duplicates and originals, so that the parent's death reaches its peers."""
        for duplicate in self._duplicates:
            os.close(duplicate.detach())
        self._duplicates.clear()
        for descriptor in self.descriptors:
            try:
                os.close(descriptor)
            except OSError:
                pass


def _connection(descriptor: int) -> socket.socket | None:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # closed meanwhile
        return None
    if duplicate.type == socket.SOCK_STREAM and duplicate.family in (socket.AF_INET, socket.AF_INET6):
        return duplicate
    duplicate.close()
    return None


def _belongs(connection: socket.socket, addresses: Collection[str], announced: Sequence[bytes]) -> bool:
    """Whether one end of the connection is a listener that a member announced.

    Gloo announces the raw socket address: port and address in network order. Searching for them in what was announced
    does not depend on the rest of its layout, which changes between versions.
    """
    try:
        ends = [connection.getsockname()[:2], connection.getpeername()[:2]]
    except OSError:  # a listener, or closed already
        return False
    if any(host not in addresses for host, _ in ends):
        return False
    if connection.family == socket.AF_INET6:
        return True
    needles = [port.to_bytes(2, "big") + socket.inet_aton(host) for host, port in ends]
    return any(needle in value for needle in needles for value in announced)
