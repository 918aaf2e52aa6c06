"""The rows of a split by number: records, and values of variable length, in shards that are mapped one by one."""

from __future__ import annotations

import math
import mmap
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.data.order.permutation import Indices
from spark_elastic.data.shards import spans
from spark_elastic.errors import DatasetError

Bytes = npt.NDArray[np.uint8]

_MORE_DESCRIPTORS = 512  # of a process, besides those of the files that it maps


class MappedFiles:
    """The files of a split's shards, mapped read-only: `files[shard]` is the bytes of one.

    `files` has None where a shard has no file; `nbytes` are the sizes by the manifest. With `later`, only files between
    `open` and `shut` may be read. Raise DatasetError for a file that is missing or has another size: to read a map past
    the file's end would kill the process with SIGBUS.
    """

    def __init__(self, files: Sequence[Path | None], nbytes: Sequence[int], *, later: bool = False) -> None:
        self.nbytes = np.array(nbytes, np.int64)
        self._files = files
        self._maps: dict[int, mmap.mmap] = {}
        self._bytes: list[Bytes] = [np.empty(0, np.uint8)] * len(files)
        allow_descriptors(2 * len(files))  # a map keeps one, and a shard may have two files
        for shard in () if later else range(len(files)):
            self.open(shard)

    def __getitem__(self, shard: int) -> Bytes:
        return self._bytes[shard]

    def open(self, shard: int) -> None:
        file, expected = self._files[shard], int(self.nbytes[shard])
        if file is None or not expected:
            return
        try:
            with open(file, "rb") as stream:
                if (found := file.stat().st_size) == expected:
                    self._maps[shard] = mmap.mmap(stream.fileno(), expected, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DatasetError(f"shard {file} cannot be read: {error}") from error
        if found != expected:
            raise DatasetError(
                f"shard {file} has {found} bytes, the manifest says {expected}; the dataset is damaged, write it again"
            )
        self._bytes[shard] = np.frombuffer(self._maps[shard], np.uint8)

    def shut(self, shard: int) -> None:
        self._bytes[shard] = np.empty(0, np.uint8)
        self._maps.pop(shard, None)  # unmapped with the last array that refers to it

    def evict(self, shard: int, start: int, stop: int) -> None:
        """Remove the whole pages of these bytes from this process's memory; a touch reads them again."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[shard].madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        for shard in list(self._maps):
            self.shut(shard)


def allow_descriptors(more: int) -> None:
    """Raise the limit of this process's open files as far as it may be raised: a shuffle holds all shards open."""
    most = more + _MORE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < most:
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class Numbering:
    """The number of each row: its position in the shards, read one after another."""

    def __init__(self, shard_rows: Sequence[int]) -> None:
        counts = np.array(shard_rows, np.int64)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self.rows = int(counts.sum())

    def places(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the shard of each row, and its place in the shard."""
        shards = np.searchsorted(self._ends, numbers, side="right")
        return shards, numbers - self._starts[shards]

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return rows number `start`..`stop` as parts of shards: (shard, first row, last row + 1)."""
        found = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, first = min(stop, int(self._ends[shard])), int(self._starts[shard])
            if start < end:
                found.append((shard, start - first, end - first))
            start, shard = end, shard + 1
        return found


class ShardRows:
    """The records of all shards: a batch takes one gather for each shard that it touches."""

    def __init__(self, files: MappedFiles, numbering: Numbering, stride: int) -> None:
        self.files = files
        self.numbering = numbering
        self.stride = stride
        self._record = np.dtype((np.void, stride))

    def gather(self, numbers: Indices, out: npt.NDArray[Any]) -> None:
        """Copy the records of the rows with these numbers to `out`, shape (n,), void of `stride` bytes."""
        shards, rows = self.numbering.places(numbers)
        count = len(self.files.nbytes)
        if count == 1:
            # places are always in range; mode "raise" would gather into a temporary buffer first
            np.take(self.files[0].view(self._record), rows, out=out, mode="clip")
            return
        # sorted by shard, each shard needs one gather; a stable sort of 16-bit values is a fast radix sort
        order = np.argsort(shards.astype(np.uint16) if count < 1 << 16 else shards, kind="stable")
        edges = np.searchsorted(shards[order], np.arange(count + 1))
        for shard in np.flatnonzero(np.diff(edges)).tolist():
            chosen = order[edges[shard] : edges[shard + 1]]
            out[chosen] = np.take(self.files[shard].view(self._record), rows[chosen])

    def evict(self, start: int, stop: int) -> None:
        """Remove rows number `start`..`stop` from this process's memory; they are not needed soon."""
        for shard, first, last in self.numbering.ranges(start, stop):
            self.files.evict(shard, first * self.stride, last * self.stride)


class Sidecars:
    """The sidecars of a split's shards: values of variable length, found through the references in records."""

    def __init__(self, files: MappedFiles, url: str) -> None:
        self.files = files
        self._url = url

    def values(self, field: TensorField, references: npt.NDArray[Any], shards: Indices) -> Any:
        """Return a list of values, or of sparse fields an array [rows, *shape]. Raise DatasetError if damaged."""
        starts, lengths = references["start"].astype(np.int64), references["length"].astype(np.int64)
        if bool(((starts < 0) | (lengths < 0) | (starts + lengths > self.files.nbytes[shards])).any()):
            raise DatasetError(
                f"{self._url}: a record refers to bytes beyond the end of its sidecar; the dataset is damaged, delete "
                "it and write it again"
            )
        if field.kind is Kind.SPARSE:
            return self._densified(field, starts, lengths, shards)
        views = {shard: self.files[shard].data for shard in np.unique(shards).tolist()}
        places = zip(shards.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        if field.kind is Kind.BYTES:
            return [bytes(views[shard][start:stop]) for shard, start, stop in places]
        if field.kind is Kind.STRING:
            return [str(views[shard][start:stop], "utf-8") for shard, start, stop in places]
        return [np.frombuffer(bytearray(views[shard][start:stop]), field.dtype) for shard, start, stop in places]

    def _densified(self, field: TensorField, starts: Indices, lengths: Indices, shards: Indices) -> npt.NDArray[Any]:
        dtype = np.dtype(field.dtype)
        out = np.zeros((len(starts), *field.shape), dtype)
        flat = out.reshape(len(starts), math.prod(field.shape))
        counts = lengths // (4 + dtype.itemsize)
        for shard in np.unique(shards).tolist():
            chosen = np.flatnonzero(shards == shard)
            data, at, count = self.files[shard], starts[chosen], counts[chosen]
            indices = _gathered(data, at, count * 4).view("<i4")
            values = _gathered(data, at + count * 4, count * dtype.itemsize).view(dtype)
            if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= flat.shape[1]):
                raise DatasetError(
                    f"{self._url}: tensor {field.name!r}: a sparse value's index is outside of its {flat.shape[1]} "
                    "values; the dataset is damaged, delete it and write it again"
                )
            flat[np.repeat(chosen, count), indices] = values
        return out


def _gathered(data: Bytes, starts: Indices, lengths: Indices) -> Bytes:
    if not ((starts % 4).any() or (lengths % 4).any()):  # sparse values are whole words, and often start at one
        words = data[: len(data) // 4 * 4].view(np.uint32)
        return np.take(words, spans(starts // 4, lengths // 4)).view(np.uint8)
    return np.take(data, spans(starts, lengths))
