"""The orders in which an epoch's rows come, and which of them a rank takes of a global batch.

Both are functions of (rows, seed, epoch) and settings that are the same on all ranks; neither depends on the number
of ranks. An epoch's state is one integer, the position up to which its order is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from spark_elastic.core.permutation import Permutation, derived_key
from spark_elastic.core.sampling import Indices


class Order(Protocol):
    """The order of one epoch."""

    rows: int

    def take(self, edges: Sequence[int], rank: int, size: int) -> tuple[Indices, list[int]]:
        """What the rank takes of the consecutive global batches `[edges[0], edges[1])`, `[edges[1], edges[2])`, ..

        Returns: the rows of all of them, int64, one batch's after another's; and how many each has.
        """


class GlobalOrder:
    """One permutation of all rows. A rank takes a contiguous part of each batch; parts differ by at most a row."""

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.rows = rows
        self.shuffle = shuffle
        self._permutation = Permutation(rows, derived_key(seed, epoch)) if shuffle else None

    def take(self, edges: Sequence[int], rank: int, size: int) -> tuple[Indices, list[int]]:
        parts = [
            (start + (stop - start) * rank // size, start + (stop - start) * (rank + 1) // size)
            for start, stop in pairwise(edges)
        ]
        counts = [stop - start for start, stop in parts]
        if size == 1 and self._permutation is not None:
            return self._permutation.span(edges[0], edges[-1]), counts
        positions = np.concatenate([np.arange(start, stop) for start, stop in parts])
        return positions if self._permutation is None else self._permutation[positions], counts
