"""What a reader hands over for one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Batch:
    """One rank's rows of one global batch.

    tensors: by field name: arrays `[rows, *shape]` for dense and sparse fields, lists of `bytes`, `str` or arrays for
    those of variable length. Arrays are views into a buffer that is used again once nothing refers to them any more,
    so keep what you need and copy nothing. rows: of this rank; 0 on some ranks where a last batch has fewer rows
    than there are ranks. global_rows: of all ranks together. start, stop: the positions `[start, stop)` of the epoch's
    order that the global batch covers; `stop` is the position to go on from when this batch has been applied.
    """

    tensors: Mapping[str, Any]
    rows: int
    global_rows: int
    start: int
    stop: int

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


class Turn:
    """Consecutive batches that were gathered in one go.

    tensors: of all their rows. edges: positions between which the global batches lie. counts: the rank's rows of each.
    """

    __slots__ = ("_counts", "_edges", "_tensors")

    def __init__(self, tensors: Mapping[str, Any], edges: Sequence[int], counts: Sequence[int]) -> None:
        self._tensors = tensors
        self._edges = edges
        self._counts = counts

    def batches(self) -> Iterator[Batch]:
        """Once. What was handed out is not held here any longer than needed for the rest."""
        tensors, self._tensors = self._tensors, {}
        start, first = self._edges[0], 0
        for stop, count in zip(self._edges[1:], self._counts, strict=True):
            last = first + count
            yield Batch({name: rows[first:last] for name, rows in tensors.items()}, count, stop - start, start, stop)
            start, first = stop, last
