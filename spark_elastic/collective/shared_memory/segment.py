"""A memory segment that one process writes and the others on its host read: words, a table, slots for tensors.

It is anonymous (`memfd_create`): it has no name in any file system, no limit but memory, and is freed with the last
process that maps it. Others open it through `/proc/<pid>/fd`, which the kernel permits to the same user only.

Layout, in bytes::

    0         identity: a MAC that only a member of the job can compute for this round and rank
    64        the words, each on a separate cache line
    TABLE     for each chunk sent, modulo DEPTH: its offset and its code
    SMALL_AT  slots for small chunks
    LARGE_AT  slots for large ones
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import warnings

import torch

# --- futex(2): sleep until another process changes a word in shared memory ---------------------------

FUTEX_AVAILABLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
"""True where Python can synchronise through words in shared memory.

On x86-64, other cores see stores in the order in which they were made, without a fence. On other architectures they may
not, and Python has no fence.
"""

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_ALL_SLEEPERS = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if FUTEX_AVAILABLE:
    _argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    _releasing_lock = ctypes.CDLL(None).syscall  # other threads run meanwhile
    _releasing_lock.argtypes = _argtypes
    _holding_lock = ctypes.PyDLL(None).syscall  # returns in a microsecond: releasing Python's lock would cost more
    _holding_lock.argtypes = _argtypes


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until woken or `timeout_s` has passed; return at once if the 32-bit word at `address` is not `value`.

    The kernel compares and falls asleep in one step: a process that stores first and then wakes is never missed.
    """
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _releasing_lock(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> None:
    """Wake all threads that sleep on this word, in any process. Fast if there are none."""
    _holding_lock(_SYS_FUTEX, address, _WAKE, _ALL_SLEEPERS, None)


# --- segments -----------------------------------------------------------------------------------------

NAME = "spark-elastic"
DEPTH = 512
"""The number of chunks that may be in flight at a time."""
SMALL_BYTES = 16 << 10
LARGE_BYTES = 1 << 20

_TABLE_AT = 4096
_SMALL_AT = _TABLE_AT + 16 * DEPTH
_SMALL_COUNT = 256
_LARGE_AT = _SMALL_AT + _SMALL_COUNT * SMALL_BYTES
_LARGE_COUNT = 64
_SIZE = _LARGE_AT + _LARGE_COUNT * LARGE_BYTES

# indexes of the words, of 8 bytes each
ARRIVED = 64 // 8
"""The count of chunks that can be read in this segment."""
REDUCED = 128 // 8
"""The count of chunks whose sum is in this member's slice."""
CONSUMED = 192 // 8
"""The count of chunks that this member has read from all segments."""
LEFT = 256 // 8
"""Not 0: this member has left the round and will send no more chunks."""
TABLE = _TABLE_AT // 8


class Mapping:
    """A segment in this process's address space."""

    def __init__(self, descriptor: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, _SIZE, mmap.MAP_SHARED, protection)
        self.words = memoryview(self._map).cast("Q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it could write to a read-only buffer
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def view(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + nbytes].view(dtype)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._map[offset : offset + nbytes]

    def unmap(self) -> None:
        """Release the memory. Tensors in it keep it mapped for as long as they exist."""
        self.words.release()
        del self.memory, self._map

    def word_address(self, word: int) -> int:
        return self.address + 8 * word


class OwnSegment(Mapping):
    """The segment that this process writes.

    Raises:
        OSError: there is no memory, or no memfd_create.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, _SIZE)
            # allocate the pages before anybody writes to them: without memory for one, a store would be a SIGBUS
            os.posix_fallocate(self.descriptor, 0, _SMALL_AT)
            super().__init__(self.descriptor, writable=True)
            self.small = SlotPool(self.descriptor, _SMALL_AT, _SMALL_COUNT, SMALL_BYTES, step=16)
            self.large = SlotPool(self.descriptor, _LARGE_AT, _LARGE_COUNT, LARGE_BYTES, step=1)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def announce(self, word: int, value: int) -> None:
        """Store a word and wake the peers that wait for it."""
        self.words[word] = value
        futex_wake(self.address + 8 * word)

    def leave(self) -> None:
        """Set `LEFT`, wake the peers, and close. Existing views keep the memory mapped."""
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
    """The segment of another process.

    Raises:
        OSError: it cannot be opened, because it belongs to another user or another process id namespace.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        path = f"/proc/{pid}/fd/{descriptor}"
        # in this namespace the pid may be another process, and opening a pipe or a device of that has side effects
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise OSError(f"{path} is not a segment of shared memory")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            super().__init__(opened, writable=False)
        finally:
            os.close(opened)


class SlotPool:
    """Slots of equal size in a segment. The slot that was returned last is taken first: it is in the cache."""

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
            self._end = self._next  # continue with the slots there are
            return False
        self.free += range(self._next, self._next + self._step, self.nbytes)
        self._next += self._step
        return True
