"""A local copy of parts of a remote file, shared by the processes of a host, in blocks that are fetched and dropped.

A second file has the states, 8 bytes a block: the block's CRC-32, and when it was last used (0: it is absent). Byte b
of that file is also block b's lock: a process that fetches or drops the block locks it exclusively, a process that
reads the block shares the lock. Locks belong to the open file, so the system releases them when a process dies, and
the block that it was fetching is still marked as absent. No process waits for a lock while it holds another one
exclusively, so there are no deadlocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from spark_elastic.errors import StoreError

BLOCK = 64 << 10
"""Bytes of a block. Chunks of rows are not aligned with blocks: smaller blocks fetch fewer bytes that are not needed,
larger ones need less book-keeping."""
_RUN = 64  # blocks that are fetched in one request: 4 MiB
_STATE = np.dtype([("crc32", "<u4"), ("used", "<u4")])
_KEEP_SIZE_AND_PUNCH_HOLE = 0x1 | 0x2
_POLL_S = 0.005
_LOCK_TIMEOUT_S = 300.0

Fetch = Callable[[int, int], bytes]  # (offset, nbytes) -> those bytes of the remote file


class BlockFile:
    """One file of the cache. Safe for threads.

    The local copy is sparse and as long as the remote file. It may be mapped, and blocks that are held may be read. It
    only ever grows: if it became shorter, processes that have it mapped would be killed by SIGBUS. Without `fetch`,
    which reads the remote file, blocks can only be dropped.
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
        """The CRC-32 that this process computed of a block; -1: not yet."""

    @classmethod
    def of_others(cls, path: Path) -> BlockFile | None:
        """Open another reader's file, to drop blocks of it. None: it was removed, or is not completely created yet."""
        with contextlib.suppress(FileNotFoundError):
            nbytes, states = path.stat().st_size, path.with_suffix(".state").stat().st_size
            if nbytes and states == -(-nbytes // BLOCK) * _STATE.itemsize:
                return cls(path, nbytes, create=False)
        return None

    # --- for readers --------------------------------------------------------------------------

    def hold(self, start: int, stop: int) -> int:
        """Fetch the absent blocks of bytes `start`..`stop`, keep all until `release`, and return the bytes fetched."""
        fetched, first, last = 0, start // BLOCK, -(-stop // BLOCK)
        try:
            for here in range(first, last, _RUN):
                blocks = range(here, min(here + _RUN, last))
                fetched += self._hold_run(blocks)
                self.states["used"][blocks.start : blocks.stop] = int(time.time())
        except BaseException:
            self._release(range(first, here))
            raise
        return fetched

    def release(self, start: int, stop: int) -> None:
        self._release(range(start // BLOCK, -(-stop // BLOCK)))

    def complete(self) -> int | None:
        """Return the CRC-32 of the whole file; None while blocks are absent."""
        if not self.states["used"].all():
            return None
        crc, last = 0, self._blocks - 1
        checksums = self.states["crc32"]
        for length, blocks in ((BLOCK, checksums[:last]), (self.nbytes - last * BLOCK, checksums[last:])):
            shift = _shift(length)
            for block in blocks.tolist():
                crc = block ^ _times(shift, crc)
        return crc

    # --- to make room -------------------------------------------------------------------------

    def drop(self, block: int) -> int:
        """Drop a block unless it is held or being fetched, and return the bytes that this freed.

        Raise OSError, with the block unchanged, if the filesystem cannot punch holes.
        """
        with self._guard:
            if self._held[block] or block in self._fetching or not self._lock(fcntl.F_WRLCK, block, block + 1):
                return 0
            try:
                if not self.states["used"][block]:
                    return 0
                state, verified = self.states[block].copy(), self._verified[block]
                self.mark_absent(block)  # before the bytes are removed, in case the process dies in between
                if not _punch(self._data, block * BLOCK, BLOCK):
                    self.states[block], self._verified[block] = state, verified
                    raise OSError(f"{self.path} cannot be made smaller")
                return BLOCK
            finally:
                self._lock(fcntl.F_UNLCK, block, block + 1)

    def mark_absent(self, block: int) -> None:
        self.states["used"][block] = 0
        self._verified[block] = -1

    def close(self) -> None:
        """Close the files, which releases all blocks."""
        if self._data >= 0:
            os.close(self._data)
            os.close(self._locks)
            self._data = self._locks = -1
            self.states = np.empty(0, _STATE)

    # --- blocks and locks ---------------------------------------------------------------------

    def _hold_run(self, blocks: range) -> int:
        fetched, deadline = 0, time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            self._share(blocks, deadline)
            absent = [block for block in blocks if not self._is_intact(block)]
            if not absent:
                return fetched
            self._release(blocks)
            for run in _runs(absent):  # if one is dropped again before all are fetched, the loop repeats
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
        """Fetch blocks and return the bytes fetched; if one is locked elsewhere, only wait for a moment.

        The caller then looks again at which blocks are absent. Waiting for the lock instead could be a deadlock: other
        readers keep the blocks that they fetched, perhaps until this reader makes progress.
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
            if all(self._is_intact(block) for block in blocks):
                return 0
            assert self._fetch is not None
            nbytes = stop - start
            data = memoryview(self._fetch(start, nbytes))
            if len(data) != nbytes:
                raise StoreError(
                    f"{self.path.name}: {len(data)} of {nbytes} bytes were delivered at {start}; the file is cut off"
                )
            for block in blocks:
                part = data[block * BLOCK - start : block * BLOCK - start + BLOCK]
                self._write(part, block * BLOCK)
                self._verified[block] = zlib.crc32(part)
                self.states[block] = (self._verified[block], int(time.time()))
            return nbytes
        finally:
            with self._guard:
                self._fetching.difference_update(blocks)
                self._lock(fcntl.F_UNLCK, blocks.start, blocks.stop)

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while len(data):  # a disk that is nearly full accepts a part of the data
                written = os.pwrite(self._data, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written: {error}; choose another cache_dir, or limit cache_bytes"
            ) from error

    def _is_intact(self, block: int) -> bool:
        """Return whether a block is present with the bytes that were fetched."""
        crc, used = self.states[block].tolist()
        if not used:
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
                f"another process has locked {self.path} for {_LOCK_TIMEOUT_S:.0f} s; end it, or use another cache_dir"
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
    """Group ascending numbers into ranges without gaps."""
    for _, numbered in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        run = [block for _, block in numbered]
        yield range(run[0], run[-1] + 1)


def _punch(file: int, offset: int, nbytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return bool(libc.fallocate(file, _KEEP_SIZE_AND_PUNCH_HOLE, offset, nbytes) == 0)


def _shift(nbytes: int) -> list[int]:
    """Return what `nbytes` zero bytes make of each bit of a CRC-32: a CRC is linear in its initial value."""
    zeros = bytes(nbytes)
    return [zlib.crc32(zeros, 1 << bit) ^ zlib.crc32(zeros) for bit in range(32)]


def _times(shift: list[int], crc: int) -> int:
    result = 0
    for column in shift:
        if crc & 1:
            result ^= column
        crc >>= 1
    return result
