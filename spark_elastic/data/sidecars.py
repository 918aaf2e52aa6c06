"""Values of variable length: found through the references that records hold, in the sidecars beside the shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.data.rows import FileRange, Piece, can_map, check_size
from spark_elastic.data.shards import spans
from spark_elastic.errors import DatasetError

Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_PAGE = 4096


class Sidecars:
    """The sidecars of a split's shards.

    Args:
        files: One path per shard; None where the shard has no sidecar.
        nbytes: The size of each sidecar by the manifest.
        url: Of the dataset, for error messages.

    Raises:
        DatasetError: A sidecar is missing, or has another size than the manifest says.
    """

    def __init__(self, files: Sequence[Path | None], nbytes: Sequence[int], url: str) -> None:
        self._url = url
        self._nbytes = np.array(nbytes, np.int64)
        pages = -(-self._nbytes // _PAGE) * _PAGE
        self._starts = np.cumsum(pages) - pages
        self._range: FileRange | None = None
        self._maps: list[Bytes] = []
        pieces = [
            Piece(file, 0, size, int(at), size)
            for file, size, at in zip(files, nbytes, self._starts.tolist(), strict=True)
            if file is not None and size
        ]
        if can_map():
            try:
                self._range = FileRange(pieces)
                return
            except OSError:  # a limit of this system, or a filesystem that maps in its own way
                pass
        for piece in pieces:
            check_size(piece.path, piece.expected)
        # mapped, never copied: files of a cache get their contents later
        self._maps = [
            np.memmap(file, np.uint8, "r") if file is not None and size else np.empty(0, np.uint8)
            for file, size in zip(files, nbytes, strict=True)
        ]

    def _spans(self, references: npt.NDArray[Any], shards: Indices) -> tuple[Bytes, Indices, Indices]:
        """Bytes, where in them the values start, and how long they are; int64, shape (rows,).

        Raises: DatasetError: a reference points out of its sidecar.
        """
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

    def values(self, field: TensorField, references: npt.NDArray[Any], shards: Indices) -> Any:
        """A batch's values: a list for those of variable length, an array [rows, *shape] for sparse ones."""
        data, starts, lengths = self._spans(references, shards)
        if field.kind is Kind.SPARSE:
            return _densified(field, data, starts, lengths, self._url)
        view = data.data
        edges = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        if field.kind is Kind.BYTES:
            return [bytes(view[start:stop]) for start, stop in edges]
        if field.kind is Kind.STRING:
            return [str(view[start:stop], "utf-8") for start, stop in edges]
        return [np.frombuffer(bytearray(view[start:stop]), field.dtype) for start, stop in edges]

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


def _gathered(data: Bytes, starts: Indices, lengths: Indices) -> npt.NDArray[np.uint8]:
    if not ((starts % 4).any() or (lengths % 4).any()):  # words, as all sparse values are, and often start at one
        words = data[: len(data) // 4 * 4].view(np.uint32)
        return np.take(words, spans(starts // 4, lengths // 4)).view(np.uint8)
    return np.take(data, spans(starts, lengths))
