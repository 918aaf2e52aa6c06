"""The rows of a split by number: records, and values of variable length, wherever the shards are.

All shards are mapped into one range of memory where the system allows it, so that one gather serves all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.data.order.permutation import Indices
from spark_elastic.data.shards import spans
from spark_elastic.errors import DatasetError

Bytes = npt.NDArray[np.uint8]

# --- files in one range of memory -------------------------------------------------------------------

_PAGE = 4096
_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_RESERVED = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
_MADV_DONTNEED = 4
_HUGE_PAGE = 2 << 20
_MOST_RUNS = 1 << 20  # entries of a placement's table: 8 MiB
_MOST_ADDRESSES = 1 << 42  # of the 2**47 that a process has
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class FileSegment:
    """A part of a file, and where it is mapped."""

    path: Path
    offset: int  # where the part starts in the file; a multiple of 4096
    nbytes: int
    at: int  # where it starts in the range; a multiple of 4096
    expected: int  # the size that the whole file must have


def can_map() -> bool:
    """Return whether files can be mapped at chosen addresses: only on Linux, with pages of 4 KiB."""
    return sys.platform == "linux" and mmap.PAGESIZE == _PAGE


def check_size(path: Path, expected: int, found: int | None = None) -> None:
    """Raise DatasetError if a file is missing, or not of the expected size; `found` is its size if it is known.

    To be called before a file is mapped: to read a map past the file's end would kill the process with SIGBUS.
    """
    if found is None:
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DatasetError(f"shard {path} cannot be read: {error}", file=str(path)) from error
    if found != expected:
        raise DatasetError(
            f"shard {path} has {found} bytes, the manifest says {expected}; the dataset is damaged, write it again",
            file=str(path),
            expected=expected,
            found=found,
        )


class FileRange:
    """Segments of files, mapped read-only into one contiguous range. Bytes between segments must not be touched.

    `bytes` is the range; no view of it may be used after `close`. With `later`, each segment is mapped by `map`. Raise
    DatasetError if a file is missing or has the wrong size, OSError if the system cannot map it.
    """

    def __init__(self, segments: Sequence[FileSegment], *, later: bool = False) -> None:
        self._address: int | None = None
        self.nbytes = max((segment.at + segment.nbytes for segment in segments), default=0)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.bytes: Bytes = np.empty(0, np.uint8)
        if not self.nbytes:
            return
        self._reserved = self._mmap(None, self.nbytes + _HUGE_PAGE, _PROT_NONE, _RESERVED, -1, 0)
        # the page cache maps files in huge pages only from an address that is a multiple of their size
        self._address = -(-self._reserved // _HUGE_PAGE) * _HUGE_PAGE
        try:
            for segment in () if later else segments:
                self.map(segment)
        except BaseException:
            self.close()
            raise
        # np.frombuffer of a ctypes array fails for more than 2 GiB on some versions; the array interface does not
        interface = {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self._address, True)}
        self.bytes = np.asarray(SimpleNamespace(__array_interface__=interface))

    def map(self, segment: FileSegment) -> None:
        assert self._address is not None
        try:
            file = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DatasetError(f"shard {segment.path} cannot be read: {error}", file=str(segment.path)) from error
        try:
            check_size(segment.path, segment.expected, os.fstat(file).st_size)
            flags = _MAP_SHARED | _MAP_FIXED
            self._mmap(self._address + segment.at, segment.nbytes, _PROT_READ, flags, file, segment.offset)
        finally:
            os.close(file)  # the map keeps the file open

    def unmap(self, segment: FileSegment) -> None:
        if self._address is not None:
            self._mmap(self._address + segment.at, segment.nbytes, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)

    def _mmap(self, address: int | None, nbytes: int, protection: int, flags: int, file: int, offset: int) -> int:
        made: int | None = self._libc.mmap(address, nbytes, protection, flags, file, offset)
        if made is None or made == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
        return made

    def evict(self, start: int, stop: int) -> None:
        """Remove the whole pages of `[start, stop)` from this process's memory; a touch reads them again."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if self._address is not None and first < last:
            self._libc.madvise(self._address + first, last - first, _MADV_DONTNEED)

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        if self._address is not None:
            self._libc.munmap(self._reserved, self.nbytes + _HUGE_PAGE)
            self._address = None

    def __del__(self) -> None:
        if self._address is not None:
            self.close()


# --- numbers of rows --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Rows that are consecutive in one file and in the numbering."""

    shard: int
    first: int  # the first row's place in the shard
    rows: int
    number: int


class Numbering:
    """The number of each row: a function of the shards' row counts and the stride, the same on every rank.

    Rows are numbered in the order of their shards, except for the few rows at the end of each shard that do not fill
    whole pages: these come last. So all shards can join in memory without a gap. `page_run` is the smallest number of
    rows whose records fill whole pages, a power of two.
    """

    def __init__(self, shard_rows: Sequence[int], page_run: int) -> None:
        last = max((shard for shard, rows in enumerate(shard_rows) if rows), default=-1)
        self.extents: list[RowExtent] = []
        tails = []
        number = 0
        for shard, rows in enumerate(shard_rows):
            whole = rows if shard == last else rows // page_run * page_run
            if whole:
                self.extents.append(RowExtent(shard, 0, whole, number))
            if rows > whole:
                tails.append((shard, whole, rows - whole))
            number += whole
        self.page_run = page_run
        self.joined = number  # numbers below this are of whole pages, but for the end of the last shard
        for shard, first, rows in tails:
            self.extents.append(RowExtent(shard, first, rows, number))
            number += rows
        self.rows = number
        self._numbers = np.array([e.number for e in self.extents], np.int64)
        self._shards = np.array([e.shard for e in self.extents], np.int64)
        self._to_place = np.array([e.first - e.number for e in self.extents], np.int64)
        in_files = sorted(self.extents, key=lambda e: (e.shard, e.first))
        self._positions = np.cumsum([0, *[e.rows for e in in_files]])[:-1]
        self._to_number = np.array([e.number for e in in_files], np.int64) - self._positions

    def places(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the shard of each row, and its place in the shard."""
        extents = self.extents_of(numbers)
        return self._shards[extents], numbers + self._to_place[extents]

    def in_file_order(self, positions: Indices) -> Indices:
        """Return the numbers of the rows at these positions of the files read one after another."""
        if self.joined == self.rows:
            return positions
        shifts: Indices = self._to_number[np.searchsorted(self._positions, positions, side="right") - 1]
        return positions + shifts

    def ranges_in_files(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the numbers of the rows at positions `start`..`stop`, as ranges [first, end).

        Positions count the rows through the files, one file after another.
        """
        found = []
        index = int(np.searchsorted(self._positions, start, side="right")) - 1
        while start < stop:
            following = int(self._positions[index + 1]) if index + 1 < len(self._positions) else self.rows
            end, shift = min(stop, following), int(self._to_number[index])
            found.append((start + shift, end + shift))
            start, index = end, index + 1
        return found

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return rows number `start`..`stop` as parts of shards: (shard, first row, last row + 1)."""
        found = []
        for index, first, end in self.parts(start, stop):
            extent = self.extents[index]
            shift = extent.first - extent.number
            found.append((extent.shard, first + shift, end + shift))
        return found

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield rows number `start`..`stop` as parts of extents: (index of the extent, first number, last + 1)."""
        index = int(np.searchsorted(self._numbers, start, side="right")) - 1
        while start < stop:
            extent = self.extents[index]
            end = min(stop, extent.number + extent.rows)
            yield index, start, end
            start, index = end, index + 1

    def extents_of(self, numbers: Indices) -> Indices:
        """Return the index of the extent that each of these rows is in."""
        return np.searchsorted(self._numbers, numbers, side="right") - 1


# --- records ----------------------------------------------------------------------------------------


class Placement:
    """The place of each row in the mapped range, counted in records from its start.

    Each extent begins at a page. With `huge`, those of 2 MiB and more begin at a multiple of that, because the page
    cache maps files in huge pages only there; otherwise each row that is gathered misses the processor's table of
    pages. The gaps between extents are addresses without memory.
    """

    def __init__(self, numbering: Numbering, stride: int, *, huge: bool) -> None:
        self._numbering = numbering
        page_run, huge_run = numbering.page_run, _HUGE_PAGE // math.gcd(stride, _HUGE_PAGE)
        self.starts: list[int] = []  # the place of each extent
        place = 0
        for extent in numbering.extents:
            run = huge_run if huge and extent.rows * stride >= _HUGE_PAGE else page_run
            place = -(-place // run) * run
            self.starts.append(place)
            place += extent.rows
        self.rows = place  # the length of the range
        numbers = np.array([extent.number for extent in numbering.extents], np.int64)
        self._shifts = np.array(self.starts, np.int64) - numbers
        self._bits = page_run.bit_length() - 1
        whole = np.searchsorted(numbers, numbering.joined)
        # of each run of whole pages, as long as there is a shift at all
        self._of_runs: Indices | None = None
        if self._shifts[:whole].any():
            runs = np.arange(0, numbering.joined, page_run)
            self._of_runs = self._shifts[numbering.extents_of(runs)]

    @classmethod
    def best(cls, numbering: Numbering, stride: int) -> Placement:
        """Return the placement at huge pages, unless it takes too many addresses or a large table."""
        if numbering.joined // numbering.page_run <= _MOST_RUNS:
            huge = cls(numbering, stride, huge=True)
            if huge.rows * stride <= _MOST_ADDRESSES:
                return huge
        return cls(numbering, stride, huge=False)

    def of(self, numbers: Indices) -> Indices:
        """Return the places of the rows with these numbers."""
        joined, places = self._numbering.joined, numbers
        if self._of_runs is not None:
            places = np.right_shift(numbers, self._bits)
            np.take(self._of_runs, places, out=places, mode="clip")
            np.add(places, numbers, out=places)
        if joined == self._numbering.rows:
            return places
        beyond = np.flatnonzero(numbers >= joined)
        if not len(beyond):
            return places
        if places is numbers:
            places = numbers.copy()
        places[beyond] = numbers[beyond] + self._shifts[self._numbering.extents_of(numbers[beyond])]
        return places


class MappedRows:
    """The records of all shards in one mapped range: one `np.take` serves a batch.

    With `later`, only shards between `open` and `shut` may be read.
    """

    def __init__(
        self, files: Sequence[Path], numbering: Numbering, stride: int, shard_nbytes: Sequence[int], later: bool = False
    ) -> None:
        self._numbering = numbering
        self._stride = stride
        self._later = later
        self._placement = Placement.best(numbering, stride)
        try:
            self._range = self._mapped(files, shard_nbytes)
        except OSError:  # a limit of the addresses of a process
            self._placement = Placement(numbering, stride, huge=False)
            self._range = self._mapped(files, shard_nbytes)
        self._records: npt.NDArray[Any] = self._range.bytes.view(np.dtype((np.void, stride)))

    def _mapped(self, files: Sequence[Path], shard_nbytes: Sequence[int]) -> FileRange:
        stride, extents = self._stride, self._numbering.extents
        self._segments = [
            FileSegment(files[e.shard], e.first * stride, e.rows * stride, start * stride, shard_nbytes[e.shard])
            for e, start in zip(extents, self._placement.starts, strict=True)
        ]
        return FileRange(self._segments, later=self._later)

    def open(self, shard: int) -> None:
        for extent, segment in zip(self._numbering.extents, self._segments, strict=True):
            if extent.shard == shard:
                self._range.map(segment)

    def shut(self, shard: int) -> None:
        for extent, segment in zip(self._numbering.extents, self._segments, strict=True):
            if extent.shard == shard:
                self._range.unmap(segment)

    def places(self, numbers: Indices) -> Indices:
        """Return where the records of these rows are, for `gather`: a part of its work for another thread."""
        return self._placement.of(numbers)

    def gather(self, places: Indices, out: npt.NDArray[Any]) -> None:
        """Copy the records at these places to `out`, shape (n,), void of `stride` bytes."""
        if len(places):
            # places are always in range; mode "raise" would gather into a temporary buffer first
            np.take(self._records, places, out=out, mode="clip")

    def evict(self, start: int, stop: int) -> None:
        """Remove rows number `start`..`stop` from this process's memory; they are not needed soon."""
        for index, first, end in self._numbering.parts(start, stop):
            shift = self._placement.starts[index] - self._numbering.extents[index].number
            self._range.evict((first + shift) * self._stride, (end + shift) * self._stride)

    def close(self) -> None:
        self._records = self._records[:0].copy()
        self._range.close()


class GatheredRows:
    """The records of shards that are mapped one by one: a batch takes one gather for each shard that it touches.

    With `later`, only shards between `open` and `shut` may be read.
    """

    def __init__(
        self, files: Sequence[Path], numbering: Numbering, stride: int, shard_nbytes: Sequence[int], later: bool = False
    ) -> None:
        self._numbering = numbering
        self._files = list(zip(files, shard_nbytes, strict=True))
        self._record = np.dtype((np.void, stride))
        self._maps: list[npt.NDArray[Any] | None] = [None] * len(self._files)
        for shard in () if later else range(len(self._files)):
            self.open(shard)

    def open(self, shard: int) -> None:
        file, nbytes = self._files[shard]
        if nbytes:
            check_size(file, nbytes)
            self._maps[shard] = np.memmap(file, self._record, "r")

    def shut(self, shard: int) -> None:
        self._maps[shard] = None

    def places(self, numbers: Indices) -> Indices:
        """Return the numbers, which `gather` takes as they are."""
        return numbers

    def gather(self, places: Indices, out: npt.NDArray[Any]) -> None:
        """Copy the records at these places to `out`, shape (n,), void of `stride` bytes."""
        shards, rows = self._numbering.places(places)
        # sorted by shard, each shard needs one gather; a stable sort of 16-bit values is a fast radix sort
        order = np.argsort(shards.astype(np.uint16) if len(self._maps) < 1 << 16 else shards, kind="stable")
        edges = np.searchsorted(shards[order], np.arange(len(self._maps) + 1))
        for shard in np.flatnonzero(np.diff(edges)):
            chosen = order[edges[shard] : edges[shard + 1]]
            records = self._maps[shard]
            assert records is not None
            out[chosen] = np.take(records, rows[chosen])

    def evict(self, start: int, stop: int) -> None:
        """Do nothing: the system decides which pages stay."""

    def close(self) -> None:
        self._maps = []


def open_rows(
    files: Sequence[Path], numbering: Numbering, stride: int, shard_nbytes: Sequence[int], later: bool = False
) -> MappedRows | GatheredRows:
    """Open the records of all shards. Raise DatasetError for a file that is missing or has the wrong size."""
    if can_map():
        with contextlib.suppress(OSError):  # a limit of this system, or a filesystem that cannot map at an address
            return MappedRows(files, numbering, stride, shard_nbytes, later)
    return GatheredRows(files, numbering, stride, shard_nbytes, later)


# --- values of variable length ----------------------------------------------------------------------


class Sidecars:
    """The sidecars of a split's shards: values of variable length, found through the references in records.

    `files` has None where a shard has no sidecar; `nbytes` are the sizes by the manifest. With `later`, only those of
    shards between `open` and `shut` may be read. Raise DatasetError if a sidecar is missing or has another size.
    """

    def __init__(self, files: Sequence[Path | None], nbytes: Sequence[int], url: str, *, later: bool = False) -> None:
        self._url = url
        self._nbytes = np.array(nbytes, np.int64)
        pages = -(-self._nbytes // _PAGE) * _PAGE
        self._starts = np.cumsum(pages) - pages
        self._range: FileRange | None = None
        self._segments = {
            shard: FileSegment(file, 0, size, int(at), size)
            for shard, (file, size, at) in enumerate(zip(files, nbytes, self._starts.tolist(), strict=True))
            if file is not None and size
        }
        self._maps: list[Bytes] = [np.empty(0, np.uint8)] * len(files)
        if can_map():
            with contextlib.suppress(OSError):  # a limit of this system, or a filesystem that cannot map at an address
                self._range = FileRange([*self._segments.values()], later=later)
                return
        for shard in () if later else self._segments:
            self.open(shard)

    def open(self, shard: int) -> None:
        segment = self._segments.get(shard)
        if segment is not None and self._range is not None:
            self._range.map(segment)
        elif segment is not None:
            check_size(segment.path, segment.expected)
            self._maps[shard] = np.memmap(segment.path, np.uint8, "r")

    def shut(self, shard: int) -> None:
        self._maps[shard] = np.empty(0, np.uint8)
        if self._range is not None and shard in self._segments:
            self._range.unmap(self._segments[shard])

    def values(self, field: TensorField, references: npt.NDArray[Any], shards: Indices) -> Any:
        """Return a batch's values: a list for fields of variable length, an array [rows, *shape] for sparse fields."""
        data, starts, lengths = self._located(references, shards)
        if field.kind is Kind.SPARSE:
            return _densified(field, data, starts, lengths, self._url)
        view = data.data
        edges = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        if field.kind is Kind.BYTES:
            return [bytes(view[start:stop]) for start, stop in edges]
        if field.kind is Kind.STRING:
            return [str(view[start:stop], "utf-8") for start, stop in edges]
        return [np.frombuffer(bytearray(view[start:stop]), field.dtype) for start, stop in edges]

    def _located(self, references: npt.NDArray[Any], shards: Indices) -> tuple[Bytes, Indices, Indices]:
        """Return an array of bytes, where each row's value starts in it, and how many bytes it has."""
        starts, lengths = references["start"].astype(np.int64), references["length"].astype(np.int64)
        if len(starts) and bool(((starts < 0) | (lengths < 0) | (starts + lengths > self._nbytes[shards])).any()):
            raise DatasetError(
                f"{self._url}: a record refers to bytes beyond the end of its sidecar; the dataset is damaged, delete "
                "it and write it again"
            )
        if self._range is not None:
            return self._range.bytes, starts + self._starts[shards], lengths
        gathered = np.empty(int(lengths.sum()), np.uint8)
        places: Indices = np.cumsum(lengths) - lengths
        for shard in np.unique(shards).tolist():
            chosen = np.flatnonzero(shards == shard)
            there = spans(starts[chosen], lengths[chosen])
            gathered[spans(places[chosen], lengths[chosen])] = self._maps[shard][there]
        return gathered, places, lengths

    def close(self) -> None:
        self._maps = []
        if self._range is not None:
            self._range.close()


def _densified(field: TensorField, data: Bytes, starts: Indices, lengths: Indices, url: str) -> npt.NDArray[Any]:
    dtype = np.dtype(field.dtype)
    out = np.zeros((len(starts), *field.shape), dtype)
    flat = out.reshape(len(starts), math.prod(field.shape))
    counts = lengths // (4 + dtype.itemsize)
    indices = _gathered(data, starts, counts * 4).view("<i4")
    values = _gathered(data, starts + counts * 4, counts * dtype.itemsize).view(dtype)
    rows = np.repeat(np.arange(len(starts)), counts)
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= flat.shape[1]):
        raise DatasetError(
            f"{url}: tensor {field.name!r}: a sparse value's index is outside of its {flat.shape[1]} values; the "
            "dataset is damaged, delete it and write it again"
        )
    flat[rows, indices] = values
    return out


def _gathered(data: Bytes, starts: Indices, lengths: Indices) -> Bytes:
    if not ((starts % 4).any() or (lengths % 4).any()):  # sparse values are whole words, and often start at one
        words = data[: len(data) // 4 * 4].view(np.uint32)
        return np.take(words, spans(starts // 4, lengths // 4)).view(np.uint8)
    return np.take(data, spans(starts, lengths))
