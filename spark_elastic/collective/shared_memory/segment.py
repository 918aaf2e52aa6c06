"""A stretch of memory that one process writes and the others on its host read: words, a table, room for tensors.

It is anonymous (`memfd_create`): it has no name in any file system, no limit but memory, and is gone with the last
process that maps it. Others open it through `/proc/<pid>/fd`, which the kernel grants to the same user only.

Layout, in bytes::

    0         identity: what only a member of the job can compute for this round and rank
    64        the words, each on a cache line of its own
    TABLE     for each piece sent, modulo DEPTH: where it lies and what it is
    SMALL_AT  room for small pieces
    LARGE_AT  room for large ones
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import warnings

import torch

# Sleeping until somebody changes a word in memory that processes share, and waking who sleeps (futex(2)).

FUTEX_AVAILABLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
"""Whether words in shared memory can be used from Python here.

A plain store followed by a plain load on another core is seen in order on x86-64 without a fence. On machines of other
kinds it is not, and Python has no fence.
"""

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if FUTEX_AVAILABLE:
    _argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    _sleeping = ctypes.CDLL(None).syscall  # other threads run meanwhile
    _sleeping.argtypes = _argtypes
    _at_once = ctypes.PyDLL(None).syscall  # returns in a microsecond: not worth letting go of Python's lock
    _at_once.argtypes = _argtypes


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until woken, at most so long; not at all if the 32-bit word at `address` is not `value`.

    The word and the sleep are one step to the kernel: who stores first and wakes then, is never missed.
    """
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _sleeping(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on this word, in any process. Cheap if nobody does."""
    _at_once(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None)


NAME = "spark-elastic"
DEPTH = 512
"""Pieces that may be under way at a time."""
SMALL_BYTES = 16 << 10
LARGE_BYTES = 1 << 20

_TABLE_AT = 4096
_SMALL_AT = _TABLE_AT + 16 * DEPTH
_SMALL_COUNT = 256
_LARGE_AT = _SMALL_AT + _SMALL_COUNT * SMALL_BYTES
_LARGE_COUNT = 64
_SIZE = _LARGE_AT + _LARGE_COUNT * LARGE_BYTES

# the words, by number of 8 bytes
ARRIVED = 64 // 8
"""Pieces that can be read here."""
REDUCED = 128 // 8
"""Pieces of which this member's slice holds the sum."""
CONSUMED = 192 // 8
"""Pieces that this member has read everywhere."""
LEFT = 256 // 8
"""Not 0: this member has left the round; nothing more will come."""
TABLE = _TABLE_AT // 8


class Mapping:
    """A segment as this process sees it."""

    def __init__(self, descriptor: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, _SIZE, mmap.MAP_SHARED, protection)
        self.words = memoryview(self._map).cast("Q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch could write where it must not
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def view(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + nbytes].view(dtype)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._map[offset : offset + nbytes]

    def unmap(self) -> None:
        """Let go of the memory; tensors that lie in it keep it until they are gone themselves."""
        self.words.release()
        del self.memory, self._map

    def word_address(self, word: int) -> int:
        return self.address + 8 * word


class OwnSegment(Mapping):
    """This process's own. Raises: OSError: there is no memory, or no memfd_create."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, _SIZE)
            # the pages are there before anybody writes to them: without memory for one, a store would be a SIGBUS
            os.posix_fallocate(self.descriptor, 0, _SMALL_AT)
            super().__init__(self.descriptor, writable=True)
            self.small = Room(self.descriptor, _SMALL_AT, _SMALL_COUNT, SMALL_BYTES, at_once=16)
            self.large = Room(self.descriptor, _LARGE_AT, _LARGE_COUNT, LARGE_BYTES, at_once=1)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def announce(self, word: int, value: int) -> None:
        """Store, and wake who waits for it."""
        self.words[word] = value
        futex_wake(self.address + 8 * word)

    def leave(self) -> None:
        """Tell the others that nothing more will come, and close. Views that are still held keep the memory."""
        if self.descriptor < 0:
            return
        self.words[LEFT] = 1
        for word in (ARRIVED, REDUCED, CONSUMED):
            futex_wake(self.word_address(word))
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        self.small.descriptor = self.large.descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)
            self.unmap()


class PeerSegment(Mapping):
    """Another process's.

    Raises: OSError: it cannot be opened: another user's, or another process id namespace's.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        path = f"/proc/{pid}/fd/{descriptor}"
        # the number may mean another process here, and opening a pipe or a device of that would have effects
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise OSError(f"{path} is no segment")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            super().__init__(opened, writable=False)
        finally:
            os.close(opened)


class Room:
    """Equally large slots, the last one given back being the first one taken: it is in the cache."""

    def __init__(self, descriptor: int, start: int, count: int, nbytes: int, at_once: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.free: list[int] = []
        """Offsets of slots."""
        self._next = start
        self._end = start + count * nbytes
        self._step = at_once * nbytes
        if not self.grow():
            raise OSError("there is no memory for a segment")

    def grow(self) -> bool:
        """Make more slots, if there is memory for them."""
        if self._next >= self._end:
            return False
        try:
            os.posix_fallocate(self.descriptor, self._next, self._step)
        except OSError:
            self._end = self._next  # what there is will do
            return False
        self.free += range(self._next, self._next + self._step, self.nbytes)
        self._next += self._step
        return True
