"""The rows of a split by number, wherever their shards lie."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import DatasetError

# Many files as one range of memory, so that one gather serves all of them.

_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTNEED = 4
_HUGE_PAGE = 2 << 20
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file, and where it goes.

    offset: in the file, a multiple of 4096. at: in the range, likewise. expected: bytes that the whole file must have.
    """

    path: Path
    offset: int
    nbytes: int
    at: int
    expected: int


def can_map() -> bool:
    """Whether files can be mapped where we want them: Linux (whose constants these are), with pages of 4 KiB."""
    return sys.platform == "linux" and mmap.PAGESIZE == 4096


def check_size(path: Path, expected: int, found: int | None = None) -> None:
    """Before a file is mapped: reading a map past the file's end would kill the process with SIGBUS.

    found: None: look.

    Raises: DatasetError: the file is missing, or not as long as the manifest says.
    """
    if found is None:
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DatasetError(f"shard {path} cannot be read: {error}", file=str(path)) from error
    if found != expected:
        raise DatasetError(
            f"shard {path} has {found} bytes, the manifest says {expected}; the set is damaged, write it again",
            file=str(path),
            expected=expected,
            found=found,
        )


class FileRange:
    """Pieces of files, mapped read-only into one contiguous range; what lies between them must not be touched.

    bytes: uint8, shape (nbytes,): the range. No view of it may be used once it is closed.

    Raises: DatasetError: a file is missing or has another size; OSError: the system does not map it.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.nbytes = max((piece.at + piece.nbytes for piece in pieces), default=0)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._address: int | None = None
        self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        if not self.nbytes:
            return
        reserved = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = self._mmap(None, self.nbytes + _HUGE_PAGE, _PROT_NONE, reserved, -1, 0)
        # where the page cache holds a file in large pieces, it is only mapped in large pieces at such an address
        self._address = -(-self._reserved // _HUGE_PAGE) * _HUGE_PAGE
        try:
            for piece in pieces:
                self._map(piece)
        except BaseException:
            self.close()
            raise
        # frombuffer of a ctypes array refuses ranges of more than 2 GiB on some versions; the interface does not
        self.bytes = np.asarray(_Interface(self._address, self.nbytes))

    def _map(self, piece: Piece) -> None:
        assert self._address is not None
        try:
            file = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DatasetError(f"shard {piece.path} cannot be read: {error}", file=str(piece.path)) from error
        try:
            check_size(piece.path, piece.expected, os.fstat(file).st_size)
            flags = _MAP_SHARED | _MAP_FIXED
            self._mmap(self._address + piece.at, piece.nbytes, _PROT_READ, flags, file, piece.offset)
        finally:
            os.close(file)  # the map keeps the file

    def _mmap(self, address: int | None, nbytes: int, protection: int, flags: int, file: int, offset: int) -> int:
        made: int | None = self._libc.mmap(address, nbytes, protection, flags, file, offset)
        if made is None or made == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
        return made

    def forget(self, start: int, stop: int) -> None:
        """Take the whole pages of `[start, stop)` out of this process's memory; they are read again when touched."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if self._address is not None and first < last:
            self._libc.madvise(self._address + first, last - first, _MADV_DONTNEED)

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        if self._address is not None:
            self._libc.munmap(self._reserved, self.nbytes + _HUGE_PAGE)
            self._address = None

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:
            self.close()


class _Interface:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, True),
        }


Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that follow each other in one file and in the order of numbers.

    shard: its index. first: the first row's place in the shard. number: the first row's number. slot: its place in
    the mapped range, in rows.
    """

    shard: int
    first: int
    rows: int
    number: int
    slot: int


class Numbering:
    """Which row has which number: a function of the shards' row counts and the stride, the same on every rank.

    Shards are numbered in their order, but for the few rows at the end of each that do not fill a run of whole pages:
    those come last. So all shards join in memory without a gap, and a number is a place, except for those few.

    run: rows after which a page ends where a row ends.
    """

    def __init__(self, shard_rows: Sequence[int], run: int) -> None:
        last = max((shard for shard, rows in enumerate(shard_rows) if rows), default=-1)
        self.runs: list[Run] = []
        tails = []
        number = 0
        for shard, rows in enumerate(shard_rows):
            whole = rows if shard == last else rows // run * run
            if whole:
                self.runs.append(Run(shard, 0, whole, number, number))
            if rows > whole:
                tails.append((shard, whole, rows - whole))
            number += whole
        self.joined = number
        """Numbers below this are places."""
        slot = -(-number // run) * run
        for shard, first, rows in tails:
            self.runs.append(Run(shard, first, rows, number, slot))
            number += rows
            slot += run
        self.rows = number
        self._numbers = np.array([r.number for r in self.runs], np.int64)
        self._shards = np.array([r.shard for r in self.runs], np.int64)
        self._shifts = np.array([r.slot - r.number for r in self.runs], np.int64)
        self._firsts = np.array([r.first - r.number for r in self.runs], np.int64)
        natural = sorted(self.runs, key=lambda r: (r.shard, r.first))
        self._natural = np.cumsum([0, *[r.rows for r in natural]])[:-1]
        self._natural_shifts = np.array([r.number for r in natural], np.int64) - self._natural

    def slots(self, numbers: Indices) -> Indices:
        """Places in the mapped range, in rows; int64, same shape."""
        if self.joined == self.rows:
            return numbers
        beyond = np.flatnonzero(numbers >= self.joined)
        if not len(beyond):
            return numbers
        slots: Indices = numbers.copy()
        slots[beyond] += self._shifts[self._run_of(numbers[beyond])]
        return slots

    def places(self, numbers: Indices) -> tuple[Indices, Indices]:
        """The shard of each row, and its place in it; int64, same shape."""
        runs = self._run_of(numbers)
        return self._shards[runs], numbers + self._firsts[runs]

    def in_file_order(self, positions: Indices) -> Indices:
        """The numbers of the rows at these positions of the files read one after another."""
        if self.joined == self.rows:
            return positions
        shifts: Indices = self._natural_shifts[np.searchsorted(self._natural, positions, side="right") - 1]
        return positions + shifts

    def ranges_in_files(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The rows at positions `start`..`stop` of the files read one after another, as ranges of numbers."""
        found = []
        index = int(np.searchsorted(self._natural, start, side="right")) - 1
        while start < stop:
            following = int(self._natural[index + 1]) if index + 1 < len(self._natural) else self.rows
            end, shift = min(stop, following), int(self._natural_shifts[index])
            found.append((start + shift, end + shift))
            start, index = end, index + 1
        return found

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, first row, last row + 1) of the parts of shards that rows number `start`..`stop` are."""
        found = []
        index = int(np.searchsorted(self._numbers, start, side="right")) - 1
        while start < stop:
            run = self.runs[index]
            end = min(stop, run.number + run.rows)
            found.append((run.shard, start - run.number + run.first, end - run.number + run.first))
            start, index = end, index + 1
        return found

    def _run_of(self, numbers: Indices) -> Indices:
        found: Indices = np.searchsorted(self._numbers, numbers, side="right") - 1
        return found


class MappedRows:
    """Records of all shards in one mapped range: one `np.take` serves a batch. See `Numbering` for the numbers."""

    def __init__(self, files: Sequence[Path], numbering: Numbering, stride: int, shard_nbytes: Sequence[int]) -> None:
        self._numbering = numbering
        self._stride = stride
        self._range = FileRange(
            [
                Piece(files[r.shard], r.first * stride, r.rows * stride, r.slot * stride, shard_nbytes[r.shard])
                for r in numbering.runs
            ]
        )
        self._records: npt.NDArray[Any] = self._range.bytes.view(np.dtype((np.void, stride)))

    def take(self, numbers: Indices, out: npt.NDArray[Any]) -> None:
        """Copy the records of these rows to `out`, shape (n,), void of `stride` bytes."""
        if len(numbers):
            # numbers are in range by construction; "raise" would gather into a buffer of its own first
            np.take(self._records, self._numbering.slots(numbers), out=out, mode="clip")

    def forget(self, start: int, stop: int) -> None:
        """Rows number `start`..`stop` are not needed soon."""
        self._range.forget(start * self._stride, min(stop, self._numbering.joined) * self._stride)

    def close(self) -> None:
        self._records = self._records[:0].copy()
        self._range.close()


class GatheredRows:
    """The same where files cannot be mapped side by side: one gather for each shard that a batch touches."""

    def __init__(self, files: Sequence[Path], numbering: Numbering, stride: int, shard_nbytes: Sequence[int]) -> None:
        self._numbering = numbering
        self._maps: list[npt.NDArray[Any] | None] = []
        record = np.dtype((np.void, stride))
        for file, nbytes in zip(files, shard_nbytes, strict=True):
            if nbytes:
                check_size(file, nbytes)
            self._maps.append(np.memmap(file, record, "r") if nbytes else None)

    def take(self, numbers: Indices, out: npt.NDArray[Any]) -> None:
        shards, rows = self._numbering.places(numbers)
        # in the order of shards, each shard's rows are gathered in one go; a stable sort of 16 bits is a radix sort
        order = np.argsort(shards.astype(np.uint16) if len(self._maps) < 1 << 16 else shards, kind="stable")
        edges = np.searchsorted(shards[order], np.arange(len(self._maps) + 1))
        for shard in np.flatnonzero(np.diff(edges)):
            chosen = order[edges[shard] : edges[shard + 1]]
            records = self._maps[shard]
            assert records is not None
            out[chosen] = np.take(records, rows[chosen])

    def forget(self, start: int, stop: int) -> None:
        """Nothing: the system does as it likes."""

    def close(self) -> None:
        self._maps = []


def open_rows(
    files: Sequence[Path], numbering: Numbering, stride: int, shard_nbytes: Sequence[int]
) -> MappedRows | GatheredRows:
    """Raises: DatasetError: a file is missing or has another size than the manifest says."""
    if can_map():
        try:
            return MappedRows(files, numbering, stride, shard_nbytes)
        except OSError:  # a limit of this system, or a filesystem that maps in its own way
            pass
    return GatheredRows(files, numbering, stride, shard_nbytes)
