"""End a Gloo group in the middle of its collectives, for which Gloo has no call.

Blocked collectives are interrupted by `shutdown()` of the TCP sockets below them, within a millisecond. It is called
from another thread than the one that uses or closes the group, so it goes through duplicates of the descriptors: the
number of a closed descriptor may already belong to another file, the number of an open duplicate cannot.

One kind of collective does not notice. When a peer is gone, Gloo loses the error of a send that its own thread writes
at that moment (`UnboundBuffer::waitSend`, in about one of fifty kills in the middle of an all-reduce). That collective
then waits for its timeout, and the group's destructor waits for the collective while it holds Python's lock. So no
thread waits longer than `GRACE_S` for a group that is over, and a group with a collective that does not end is kept
alive until it has ended.

The destructors are slow, too. A group's waits for the turns of Gloo's event loop, which come every 10 ms unless data
does; it is fast once the loop has closed the connections that were shut down. A device's waits for that loop to end.
Both hold Python's lock meanwhile. So a group is destroyed a moment after its end, and devices serve one world after
another.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spark_elastic import clock

log = logging.getLogger("spark_elastic.collective")

GRACE_S = 0.1
"""The time that a collective may take to fail after the end of its group. Usually it takes a millisecond."""
_SETTLE_S = 0.1
"""The time after the shutdown of its connections until a group is destroyed."""
_TRIM_EVERY = 50
"""Groups after which memory is given back, which takes some milliseconds on a thread of its own."""
_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_MOST_DESCRIPTORS = 4096
"""Descriptors to look at where the system lists none."""

# --- sockets ----------------------------------------------------------------------------------------


def open_sockets() -> dict[int, int]:
    """Return the open sockets of this process: descriptor → inode. An inode's number is not used again."""
    found = {}
    try:
        descriptors = list(map(int, os.listdir(_DESCRIPTORS)))
    except OSError:
        descriptors = list(range(_MOST_DESCRIPTORS))
    for descriptor in descriptors:
        try:
            status = os.fstat(descriptor)
        except OSError:  # the listing's own descriptor, or closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[descriptor] = status.st_ino
    return found


class GroupSockets:
    """Duplicates of the connections of one group.

    `before`: inodes of the sockets that were open before any member could connect to this one (descriptors may be used
    again). `announced`: what the members have put into the rendezvous; each value contains its listener's port.
    """

    def __init__(self, before: Collection[int], addresses: Collection[str], announced: Sequence[bytes]) -> None:
        self._lock = threading.Lock()
        self.descriptors: list[int] = []
        """Gloo's own descriptors. A forked child closes them, so that it does not hold its parent's connections."""
        self._duplicates: list[socket.socket] = []
        for descriptor, inode in sorted(open_sockets().items()):
            duplicate = _connection(descriptor) if inode not in before else None
            if duplicate is None:
                continue
            if _belongs_to_group(duplicate, addresses, announced):
                self.descriptors.append(descriptor)
                self._duplicates.append(duplicate)
            else:
                duplicate.close()

    def shutdown(self) -> None:
        """End every connection: blocked collectives fail. May be called from any thread, repeatedly."""
        with self._lock:
            for duplicate in self._duplicates:
                with suppress(OSError):  # the peer was faster
                    duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicates; Gloo closes the connections themselves."""
        with self._lock:
            for duplicate in self._duplicates:
                duplicate.close()
            self._duplicates.clear()

    def close_in_child(self) -> None:
        """Close duplicates and originals in a forked child, so that the parent's death reaches its peers."""
        for duplicate in self._duplicates:
            os.close(duplicate.detach())
        self._duplicates.clear()
        for descriptor in self.descriptors:
            with suppress(OSError):
                os.close(descriptor)


def _connection(descriptor: int) -> socket.socket | None:
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # closed meanwhile
        return None
    if duplicate.type == socket.SOCK_STREAM and duplicate.family in (socket.AF_INET, socket.AF_INET6):
        return duplicate
    duplicate.close()
    return None


def _belongs_to_group(connection: socket.socket, addresses: Collection[str], announced: Sequence[bytes]) -> bool:
    """Return True if one end of the connection is a listener that a member announced.

    Gloo announces the raw socket address, with port and address in network order. A search for these bytes does not
    depend on the rest of the layout, which changes between versions.
    """
    try:
        ends = [connection.getsockname()[:2], connection.getpeername()[:2]]
    except OSError:  # a listener, or already closed
        return False
    if any(host not in addresses for host, _ in ends):
        return False
    if connection.family == socket.AF_INET6:  # between port and address there are four bytes of the flow
        needles = [port.to_bytes(2, "big") + bytes(4) + socket.inet_pton(socket.AF_INET6, host) for host, port in ends]
    else:
        needles = [port.to_bytes(2, "big") + socket.inet_aton(host) for host, port in ends]
    return any(needle in value for needle in needles for value in announced)


# --- collectives that do not end ----------------------------------------------------------------------


def has_ended(work: dist.Work, within: timedelta) -> bool:
    """Wait for a collective for at most `within`; return True if it is done. Raise the error that it failed with."""
    try:
        work.wait(within)
    except Exception:
        if not work.is_completed():
            return False
        work.wait()  # the wait may have timed out just before the collective ended
    return True


def is_stuck(work: dist.Work) -> bool:
    """Return True if a collective does not end although the connections of its group were shut down."""
    try:
        return not has_ended(work, timedelta(seconds=GRACE_S))
    except Exception:
        return False


_left_behind: list[tuple[Any, list[dist.Work]]] = []


def leave_behind(group: Any, stuck: list[dist.Work]) -> None:
    """Keep a process group alive until its stuck collectives have ended; see `free_ended_groups`."""
    log.warning("%d collectives of a world that is over have not ended; their threads stay until they do", len(stuck))
    _left_behind.append((group, stuck))


def free_ended_groups() -> None:
    """Free the groups that were left behind and whose collectives have ended since."""
    _left_behind[:] = [kept for kept in _left_behind if not all(work.is_completed() for work in kept[1])]


# --- groups that have ended ---------------------------------------------------------------------------


class Graveyard:
    """Process groups that are over, whose connections were shut down, and that a thread destroys in a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: deque[tuple[float, Any]] = deque()
        """Each with the time from which it may be destroyed."""
        self._thread: threading.Thread | None = None
        self._destroyed = 0
        """Groups that were destroyed since memory was given back."""

    def bury(self, group: Any) -> None:
        """Take a group over; the caller must not keep a reference."""
        with self._lock:
            self._groups.append((clock.monotonic() + _SETTLE_S, group))
            if self._thread is None:
                self._thread = threading.Thread(target=self._destroy, name="spark-elastic-gloo-ends", daemon=True)
                self._thread.start()

    def empty(self) -> None:
        """Destroy all groups now."""
        with self._lock:
            self._groups.clear()

    def forget_in_child(self) -> list[Any]:
        """Return the groups, which a forked child must not destroy, and forget them."""
        groups = [group for _, group in self._groups]
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread that the child does not have
        return groups

    def _destroy(self) -> None:
        while True:
            with self._lock:
                if not self._groups:
                    self._thread = None
                    return
                due = self._groups[0][0]
            left = due - clock.monotonic()
            if left > 0:
                time.sleep(left)
                continue
            with self._lock:
                ended = self._groups.popleft() if self._groups else None
            del ended
            self._destroyed += 1
            if self._destroyed >= _TRIM_EVERY:
                self._destroyed = 0
                # Groups allocate on many threads that end with them. What they free is between small blocks that are
                # still in use, and glibc keeps it: some 50 KB a world, several hundred MB after ten thousand worlds.
                if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                    libc.malloc_trim(0)


graveyard = Graveyard()
"""The ended groups of this process."""
atexit.register(graveyard.empty)


def keep_for_ever(thing: Any) -> None:
    """Never destroy the object, not even at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
