"""Memory that the processes of one host share: segments, the order of accesses to them, and sleeping on a counter.

A segment is written by one process and read by the others on its host. It is anonymous (`memfd_create`): it has no name
in any file system, no limit but memory, and is freed with the last process that maps it. Others open it through
`/proc/<pid>/fd`, which the kernel permits to the same user only.

Layout, in bytes::

    0         identity: a MAC of the segment's nonce that only a member of the job can compute
    64        the counters, each on a separate cache line
    TABLE     for each chunk sent, modulo DEPTH: its offset and its code
    SMALL_AT  slots for small chunks
    LARGE_AT  slots for large ones

The counters carry the synchronisation: a member writes a chunk and its table entry, then a counter; a member that has
read the counter reads the chunk. Processors other than x86-64 keep that order only with a `fence` on both sides.
"""

from __future__ import annotations

import ctypes
import hmac
import mmap
import os
import platform
import select
import sys
import warnings
from collections.abc import Callable
from threading import Lock

import torch

from spark_elastic.collective.reduce import LARGE_CHUNK_BYTES, SMALL_CHUNK_BYTES

# --- memory order, and futex(2): sleep until another process changes a counter in shared memory -------

_FUTEX_CALLS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}
"""The number of the system call `futex` by machine, for 64-bit processes."""
_IS_64_BIT = sys.maxsize > 2**32
"""False for a 32-bit Python on a 64-bit kernel, where system calls have other numbers."""
_SYS_FUTEX = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" and _IS_64_BIT else None

FUTEX_AVAILABLE = _SYS_FUTEX is not None and sys.byteorder == "little"
"""True where Python can synchronise through counters in shared memory. futex compares the low half of a counter."""
REORDERS = platform.machine() not in ("x86_64", "AMD64")
"""True if a core may make stores visible, and perform loads, in another order than the program's. x86-64 does neither;
see docs/decisions/11-memory-barrier.md."""

_WAIT, _WAKE = 0, 1
_ALL_SLEEPERS = 0x7FFFFFFF


def fence_by_lock() -> None:
    """Order all earlier loads and stores of this thread before all later ones, as other processes see them.

    Releasing a lock is a store-release and acquiring it a load-acquire. Neither is a fence: accesses may move into the
    locked section from both sides. But ARM keeps a release before a later acquire, so a release that is followed by an
    acquire is one. No other thread ever sees this lock.
    """
    lock = Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


fence: Callable[[], None] = fence_by_lock if REORDERS else lambda: None
"""Called between the stores to shared memory and the counter that announces them, and between a counter and the loads
that rely on it."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if FUTEX_AVAILABLE:
    _argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    _releasing_lock = ctypes.CDLL(None).syscall  # other threads run meanwhile
    _releasing_lock.argtypes = _argtypes
    _holding_lock = ctypes.PyDLL(None).syscall  # returns in a microsecond: releasing Python's lock would cost more
    _holding_lock.argtypes = _argtypes


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until woken or `timeout_s` has passed, if the 32-bit number at `address` is `value`.

    The kernel compares and falls asleep in one step, so a process that stores first and then wakes is never missed.
    """
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _releasing_lock(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> None:
    """Wake all threads, in any process, that wait for the counter at `address`. Cheap if no thread waits."""
    _holding_lock(_SYS_FUTEX, address, _WAKE, _ALL_SLEEPERS, None)


# --- segments -----------------------------------------------------------------------------------------

NAME = "spark-elastic"
DEPTH = 512
"""The number of chunks that may be in flight at a time."""

_TABLE_AT = 4096
_SMALL_AT = _TABLE_AT + 16 * DEPTH
_SMALL_COUNT = 256
_LARGE_AT = _SMALL_AT + _SMALL_COUNT * SMALL_CHUNK_BYTES
_LARGE_COUNT = 64
_SIZE = _LARGE_AT + _LARGE_COUNT * LARGE_CHUNK_BYTES

# indexes of the counters, of 8 bytes each
ARRIVED = 64 // 8
"""The count of chunks that can be read in this segment."""
CONSUMED = 128 // 8
"""The count of chunks that this member has read from all segments."""
LEFT = 192 // 8
"""Not 0: this member has left the round and will send no more chunks."""
TABLE = _TABLE_AT // 8


def first_count(round: int) -> int:
    """Return the number that all counts of a round begin with, so that a count of another round is recognised."""
    return (round & 0xFFFFFF) << 40


class Mapping:
    """A segment in this process's address space."""

    def __init__(self, descriptor: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, _SIZE, mmap.MAP_SHARED, protection)
        self.counters = memoryview(self._map).cast("Q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it could write to a read-only buffer
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def view(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + nbytes].view(dtype)

    def unmap(self) -> None:
        """Release the memory. Tensors in it keep it mapped for as long as they exist."""
        self.counters.release()
        del self.memory, self._map

    def counter_address(self, counter: int) -> int:
        return self.address + 8 * counter


class OwnSegment(Mapping):
    """The segment that this process writes. Raises OSError if there is no memory, or no memfd_create."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, _SIZE)
            # allocate the pages before a process writes to them: without memory for one, a store would be a SIGBUS
            os.posix_fallocate(self.descriptor, 0, _SMALL_AT)
            super().__init__(self.descriptor, writable=True)
            self.small = SlotPool(self.descriptor, _SMALL_AT, _SMALL_COUNT, SMALL_CHUNK_BYTES, step=16)
            self.large = SlotPool(self.descriptor, _LARGE_AT, _LARGE_COUNT, LARGE_CHUNK_BYTES, step=1)
        except BaseException:
            os.close(self.descriptor)
            raise

    def identify(self, identity: bytes) -> None:
        """Write this member's identity."""
        self._map[: len(identity)] = identity

    def reset(self, round: int) -> None:
        """Set the counters to the first count of the round."""
        for counter in (ARRIVED, CONSUMED):
            self.counters[counter] = first_count(round)

    def announce(self, counter: int, value: int) -> None:
        """Store a counter, after all that this member has read and written, and wake the peers that wait for it."""
        fence()
        self.counters[counter] = value
        futex_wake(self.address + 8 * counter)

    def leave(self) -> None:
        """Set `LEFT`, wake the peers, and close. Existing views keep the memory mapped."""
        if self.descriptor < 0:
            return
        fence()
        self.counters[LEFT] = 1
        for counter in (ARRIVED, CONSUMED):
            futex_wake(self.counter_address(counter))
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        self.small.descriptor = self.large.descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)
            self.unmap()


class SlotPool:
    """Slots of equal size in a segment. The slot that was returned last is used first: it is in the cache."""

    def __init__(self, descriptor: int, start: int, count: int, nbytes: int, step: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.free: list[int] = []
        """The offsets of the free slots."""
        self._next = start
        self._end = start + count * nbytes
        self._step = step * nbytes
        if not self.grow():
            raise OSError("there is no memory for a segment")

    def grow(self) -> bool:
        """Add slots; return False if there is no memory or no space for more."""
        if self._next >= self._end:
            return False
        try:
            os.posix_fallocate(self.descriptor, self._next, self._step)
        except OSError:
            self._end = self._next  # continue with the present slots
            return False
        self.free += range(self._next, self._next + self._step, self.nbytes)
        self._next += self._step
        return True


class Peer(Mapping):
    """Another member on this host: its segment, mapped for reading, and its process.

    Raises OSError if the segment cannot be opened, because it belongs to another user or another process id namespace,
    and ValueError if it does not have the identity.
    """

    def __init__(self, rank: int, pid: int, descriptor: int, identity: bytes) -> None:
        path = f"/proc/{pid}/fd/{descriptor}"
        # in this namespace the pid may be another process, and opening a pipe or a device of that has side effects
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise OSError(f"{path} is not a segment of shared memory")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            super().__init__(opened, writable=False)
        finally:
            os.close(opened)
        if not hmac.compare_digest(self._map[: len(identity)], identity):
            self.unmap()
            raise ValueError(f"process {pid} is not rank {rank} here")
        self.rank = rank
        """Its rank in the group."""
        try:
            self._process = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._process = -1

    def is_dead(self) -> bool:
        if self._process < 0:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        descriptor, self._process = self._process, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.unmap()
