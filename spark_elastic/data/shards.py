"""Write records to shards: one file after another, each with a sidecar if fields have variable length."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.manifest import Kind, Layout, Shard
from spark_elastic.data.store import Store, make_folder, sync_folder

SHARD_BYTES = 512 << 20  # few files keep readers fast, and a file of this size is fetched in seconds


@dataclass(frozen=True, slots=True)
class Blob:
    """The values of one field for some rows, end to end."""

    data: npt.NDArray[np.uint8]  # the bytes of all values
    lengths: npt.NDArray[np.int64]  # the number of bytes of each value

    def __getitem__(self, rows: slice) -> Blob:
        ends = np.cumsum(self.lengths)
        start, stop, _ = rows.indices(len(self.lengths))
        first = int(ends[start - 1]) if start else 0
        last = int(ends[stop - 1]) if stop else 0
        return Blob(self.data[first:last], self.lengths[start:stop])

    def take(self, rows: npt.NDArray[np.int64]) -> Blob:
        """Return the values of these rows, in their order."""
        lengths = self.lengths[rows]
        starts = (np.cumsum(self.lengths) - self.lengths)[rows]
        return Blob(self.data[spans(starts, lengths)], lengths)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are ready to be written."""

    # The records, C-contiguous. Their references into the sidecar are set when they are written.
    records: npt.NDArray[Any]
    blobs: Mapping[str, Blob] = field(default_factory=dict)  # the values in the sidecar, by field

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rows: slice) -> Block:
        return Block(self.records[rows], {name: blob[rows] for name, blob in self.blobs.items()})

    def take(self, rows: npt.NDArray[np.int64]) -> Block:
        return Block(np.take(self.records, rows), {name: blob.take(rows) for name, blob in self.blobs.items()})


class ShardWriter:
    """A writer of shards, which starts a new one when the records or the sidecar reach `shard_bytes`.

    Without rows there is no file. The files are ``<stem>-<number>.rows`` and ``.side``; the stem must be different for
    each attempt of a task. With `durable`, finished shards survive a power cut, for which a local folder waits for the
    disk.
    """

    def __init__(
        self, store: Store, stem: str, layout: Layout, shard_bytes: int = SHARD_BYTES, *, durable: bool = False
    ) -> None:
        self._durable = durable
        self._store = store
        self._stem = stem
        self._layout = layout
        self._shard_bytes = shard_bytes
        self._rows_per_shard = max(1, shard_bytes // layout.stride)
        self._done: list[Shard] = []
        self._rows = 0
        self._records: _File | None = None
        self._sidecar: _File | None = None

    def write(self, block: Block) -> None:
        while len(block):
            if room := self._room(block):
                self._append(block[:room])
                block = block[room:]
            else:
                self._end_shard()

    def _room(self, block: Block) -> int:
        """Return how many rows of the block fit into this shard; 0: the shard must end."""
        room = self._rows_per_shard - self._rows
        if not block.blobs:
            return room
        left = self._shard_bytes - (self._sidecar.nbytes if self._sidecar is not None else 0)
        rows = 0
        if left > 0:
            ends = np.cumsum(sum(blob.lengths for blob in block.blobs.values()))
            rows = int(np.searchsorted(ends, left)) + 1
        return min(room, rows)

    def close(self) -> tuple[Shard, ...]:
        """End the last shard, and return all shards that were written."""
        if self._records is not None:
            self._end_shard()
        return tuple(self._done)

    def abort(self) -> None:
        """Delete all shards that were written."""
        if self._records is not None:
            self._end_shard()
        for shard in self._done:
            self._store.delete(shard.file)
            if shard.sidecar is not None:
                self._store.delete(shard.sidecar)

    def _append(self, part: Block) -> None:
        if self._records is None:
            name = f"{self._stem}-{len(self._done):03d}"
            self._records = _File(self._store, f"{name}.rows", self._durable)
            if any(field.kind is not Kind.DENSE for field in self._layout.fields):
                self._sidecar = _File(self._store, f"{name}.side", self._durable)
        if self._sidecar is not None:
            # not copy(): it would leave what the memory held before in the gaps between fields
            records = np.zeros(len(part), part.records.dtype)
            records[:] = part.records
            for name, blob in part.blobs.items():
                records[name]["start"] = self._sidecar.nbytes + np.cumsum(blob.lengths) - blob.lengths
                records[name]["length"] = blob.lengths
                self._sidecar.write(blob.data)
            part = Block(records)
        self._records.write(part.records)
        self._rows += len(part)

    def _end_shard(self) -> None:
        assert self._records is not None
        records, sidecar, rows = self._records, self._sidecar, self._rows
        self._records, self._sidecar, self._rows = None, None, 0
        records.close()
        shard = Shard(records.path, rows, records.nbytes, records.crc32)
        if sidecar is not None:
            sidecar.close()
            shard = replace(shard, sidecar=sidecar.path, sidecar_nbytes=sidecar.nbytes, sidecar_crc32=sidecar.crc32)
        self._done.append(shard)


class _File:
    def __init__(self, store: Store, path: str, durable: bool) -> None:
        self.path = path
        self._durable = durable
        self.nbytes = 0
        self.crc32 = 0
        self._local = store.is_local
        if self._local:
            self._folder = store.local_path(path).parent
            make_folder(self._folder, durable)
            self._stream: Any = store.local_path(path).open("xb", buffering=0)
        else:
            self._stream = store.open_output(path)

    def write(self, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1).data
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += len(data)
        while len(data):  # an unbuffered file may accept a part of the data
            data = data[self._stream.write(data) or len(data) :]

    def close(self) -> None:
        if self._durable and self._local:
            os.fsync(self._stream.fileno())
            sync_folder(self._folder)
        self._stream.close()


def spans(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Concatenate the ranges `[start, start + length)` of all starts and lengths."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    offsets: npt.NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    offsets += np.arange(total, dtype=np.int64)
    return offsets


def encode_sparse(counts: npt.NDArray[Any], indices: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> Blob:
    """Encode sparse rows for the sidecar: for each row its int32 indices, then as many values of 4 or 8 bytes.

    `counts` are the numbers of values of each row; `indices` and `values` have those of all rows end to end.
    """
    counts = counts.astype(np.int64)
    words = values.dtype.itemsize // 4  # everything is written as words of 4 bytes
    lengths = counts * (1 + words)
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.int32)
    out[spans(starts, counts)] = indices
    out[spans(starts + counts, counts * words)] = np.ascontiguousarray(values).view(np.int32)
    return Blob(out.view(np.uint8), lengths * 4)
