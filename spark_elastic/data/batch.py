"""What a reader hands over for one step."""

from __future__ import annotations

from collections.abc import Mapping
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
