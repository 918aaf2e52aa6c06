"""A local copy of parts of a remote file, shared by the processes of a host: blocks that are fetched, held, dropped.

Beside the data lies a file of states, 8 bytes a block: the CRC-32 of the block, and when it was last wanted (0: it is
not there). Byte b of that file is also block b's lock: whoever fetches or drops the block has it alone, whoever reads
the block shares it. Locks belong to the open file: a process that dies lets go of them, and what it was fetching is
still marked as absent. Nobody waits for a lock while holding another one alone, so nobody waits for ever.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spark_elastic.errors import StoreError

BLOCK = 64 << 10
"""Chunks of lanes do not begin where blocks do: smaller blocks fetch less twice, larger ones need less book-keeping."""
_RUN = 64
"""Blocks that are fetched in one request: 4 MiB."""
_STATE = np.dtype([("crc32", "<u4"), ("wanted", "<u4")])
_KEEP_SIZE_AND_PUNCH_HOLE = 0x1 | 0x2
_POLL_S = 0.005
_PATIENCE_S = 300.0

Fetch = Callable[[int, int], bytes]
"""(offset, nbytes) -> those bytes of the remote file."""


class BlockFile:
    """path: of the local copy, sparse, as long as the remote file; it may be mapped, and held blocks may be read.

    Safe for threads. Files only ever grow: one that became shorter would kill whoever has it mapped.
    """

    def __init__(self, path: Path, nbytes: int, fetch: Fetch | None = None, *, create: bool = True) -> None:
        self.path = path
        self.nbytes = nbytes
        self._blocks = -(-nbytes // BLOCK)
        self._fetch = fetch
        states = path.with_suffix(".state")
        self._data = _opened(path, nbytes, create)
        try:
            self._locks = _opened(states, self._blocks * _STATE.itemsize, create)
        except OSError:
            os.close(self._data)
            raise
        self.states: Any = (
            np.memmap(states, _STATE, "r+", shape=(self._blocks,)) if self._blocks else np.empty(0, _STATE)
        )
        self._guard = threading.Lock()
        self._held: Counter[int] = Counter()
        self._fetching: set[int] = set()
        self._verified = np.full(self._blocks, -1, np.int64)
        """CRC-32 of what this process has seen in a block; -1: nothing yet."""

    @classmethod
    def of_others(cls, path: Path) -> BlockFile | None:
        """A file that some reader made, to make room in it; None: it is not all there yet, or gone."""
        try:
            nbytes, states = path.stat().st_size, path.with_suffix(".state").stat().st_size
            if nbytes and states == -(-nbytes // BLOCK) * _STATE.itemsize:
                return cls(path, nbytes, create=False)
        except FileNotFoundError:
            pass
        return None

    # --- for readers --------------------------------------------------------------------------

    def hold(self, start: int, stop: int) -> int:
        """Have bytes `start`..`stop` here, and keep them until `release`. Returns: the bytes that were fetched.

        Raises: StoreError: they cannot be fetched.
        """
        fetched, first, last = 0, start // BLOCK, -(-stop // BLOCK)
        try:
            for here in range(first, last, _RUN):
                blocks = range(here, min(here + _RUN, last))
                fetched += self._hold_run(blocks)
                self.states["wanted"][blocks.start : blocks.stop] = int(time.time())
        except BaseException:
            self._release(range(first, here))
            raise
        return fetched

    def release(self, start: int, stop: int) -> None:
        self._release(range(start // BLOCK, -(-stop // BLOCK)))

    def complete(self) -> int | None:
        """The CRC-32 of the whole file; None while blocks are absent."""
        if not self.states["wanted"].all():
            return None
        crc, last = 0, self._blocks - 1
        for length, blocks in (
            (BLOCK, self.states["crc32"][:last]),
            (self.nbytes - last * BLOCK, self.states["crc32"][last:]),
        ):
            shift = _shift(length)
            for block in blocks.tolist():
                crc = block ^ _times(shift, crc)
        return crc

    # --- for who makes room -------------------------------------------------------------------

    def drop(self, block: int) -> int:
        """Take a block away unless somebody reads it. Returns: the bytes that are free now.

        Raises: OSError: files cannot be made smaller here; the block is still there.
        """
        with self._guard:
            if self._held[block] or block in self._fetching or not self._lock(fcntl.F_WRLCK, block, block + 1):
                return 0
            try:
                if not self.states["wanted"][block]:
                    return 0
                state, verified = self.states[block].copy(), self._verified[block]
                self.forget(block)  # before its bytes are gone, so that a death in between leaves nothing wrong
                if not _punch(self._data, block * BLOCK, BLOCK):
                    self.states[block], self._verified[block] = state, verified
                    raise OSError(f"{self.path} cannot be made smaller")
                return BLOCK
            finally:
                self._lock(fcntl.F_UNLCK, block, block + 1)

    def forget(self, block: int) -> None:
        """Mark a block as absent."""
        self.states["wanted"][block] = 0
        self._verified[block] = -1

    def close(self) -> None:
        """Lets go of everything that is held."""
        if self._data >= 0:
            os.close(self._data)
            os.close(self._locks)
            self._data = self._locks = -1
            self.states = np.empty(0, _STATE)

    # --- blocks and locks ---------------------------------------------------------------------

    def _hold_run(self, blocks: range) -> int:
        fetched, deadline = 0, time.monotonic() + _PATIENCE_S
        while True:
            self._share(blocks, deadline)
            absent = [block for block in blocks if not self._sound(block)]
            if not absent:
                return fetched
            self._release(blocks)
            for run in _runs(absent):  # one of them may be dropped again before all are there: then once more
                fetched += self._fetch_run(run, deadline)

    def _share(self, blocks: range, deadline: float) -> None:
        while True:
            with self._guard:
                if self._fetching.isdisjoint(blocks) and self._lock(fcntl.F_RDLCK, blocks.start, blocks.stop):
                    self._held.update(blocks)
                    return
            self._pause(deadline)

    def _release(self, blocks: Iterable[int]) -> None:
        with self._guard:
            free = []
            for block in blocks:
                self._held[block] -= 1
                if self._held[block] <= 0:
                    del self._held[block]
                    free.append(block)
            for run in _runs(free):
                self._lock(fcntl.F_UNLCK, run.start, run.stop)

    def _fetch_run(self, blocks: range, deadline: float) -> int:
        """Fetch them, unless somebody else is at one of them; then it is only waited for a moment, for what is absent
        may be another range by then: others keep what they fetched, maybe for as long as we do not come on.

        Returns: the bytes that were fetched.
        """
        with self._guard:
            mine = (
                self._fetching.isdisjoint(blocks)
                and not any(self._held[block] for block in blocks)
                and self._lock(fcntl.F_WRLCK, blocks.start, blocks.stop)
            )
            if mine:
                self._fetching.update(blocks)
        if not mine:
            self._pause(deadline)
            return 0
        try:
            start, stop = blocks.start * BLOCK, min(blocks.stop * BLOCK, self.nbytes)
            if all(self._sound(block) for block in blocks):
                return 0
            data = memoryview(self._fetched(start, stop - start))
            for block in blocks:
                part = data[block * BLOCK - start : block * BLOCK - start + BLOCK]
                self._write(part, block * BLOCK)
                self._verified[block] = zlib.crc32(part)
                self.states[block] = (self._verified[block], int(time.time()))
            return stop - start
        finally:
            with self._guard:
                self._fetching.difference_update(blocks)
                self._lock(fcntl.F_UNLCK, blocks.start, blocks.stop)

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while len(data):  # a disk that is nearly full takes a part of it first
                written = os.pwrite(self._data, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written: {error}; choose another cache_dir, or limit cache_bytes"
            ) from error

    def _fetched(self, start: int, nbytes: int) -> bytes:
        assert self._fetch is not None
        data = self._fetch(start, nbytes)
        if len(data) != nbytes:
            raise StoreError(
                f"{self.path.name}: {len(data)} of {nbytes} bytes were delivered at {start}; the file is cut off"
            )
        return data

    def _sound(self, block: int) -> bool:
        """Whether a block is there, and its bytes are those that were fetched."""
        crc, wanted = self.states[block].tolist()
        if not wanted:
            return False
        if self._verified[block] != crc:
            self._verified[block] = zlib.crc32(
                os.pread(self._data, min(BLOCK, self.nbytes - block * BLOCK), block * BLOCK)
            )
        return bool(self._verified[block] == crc)

    def _lock(self, kind: int, start: int, stop: int) -> bool:
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, stop - start, 0)
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, request)
            return True
        except BlockingIOError:
            return False

    def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise StoreError(
                f"another process has held {self.path} for {_PATIENCE_S:.0f} s; end it, or use another cache_dir"
            )
        time.sleep(_POLL_S)


def _opened(path: Path, nbytes: int, create: bool) -> int:
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    if os.fstat(file).st_size < nbytes:
        os.ftruncate(file, nbytes)
    return file


def _runs(blocks: Iterable[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    start = stop = -1
    for block in blocks:
        if block != stop:
            if stop > start:
                yield range(start, stop)
            start = block
        stop = block + 1
    if stop > start:
        yield range(start, stop)


def _punch(file: int, offset: int, nbytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return bool(libc.fallocate(file, _KEEP_SIZE_AND_PUNCH_HOLE, offset, nbytes) == 0)


def _shift(nbytes: int) -> list[int]:
    """What appending `nbytes` does to each bit of a CRC-32: the CRC is linear in the one it goes on from."""
    zeros = bytes(nbytes)
    return [zlib.crc32(zeros, 1 << bit) ^ zlib.crc32(zeros) for bit in range(32)]


def _times(shift: list[int], crc: int) -> int:
    result = 0
    for column in shift:
        if crc & 1:
            result ^= column
        crc >>= 1
    return result
