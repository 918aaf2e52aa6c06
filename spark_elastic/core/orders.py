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

    def take(self, batches: Sequence[tuple[int, int]], rank: int, size: int) -> list[Indices]:
        """Rows that the rank takes of each global batch `[start, stop)`; int64, in the order they stand in it."""


class GlobalOrder:
    """One permutation of all rows. A rank takes a contiguous part of each batch; parts differ by at most a row."""

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.rows = rows
        self._permutation = Permutation(rows, derived_key(seed, epoch)) if shuffle else None

    def take(self, batches: Sequence[tuple[int, int]], rank: int, size: int) -> list[Indices]:
        parts = []
        for start, stop in batches:
            lo, hi = (start + (stop - start) * part // size for part in (rank, rank + 1))
            parts.append((lo, hi))
        if all(a[1] == b[0] for a, b in pairwise(parts)):
            positions = np.arange(parts[0][0], parts[-1][1]) if parts else np.empty(0, np.int64)
        else:
            positions = np.concatenate([np.arange(lo, hi) for lo, hi in parts])
        rows = positions if self._permutation is None else self._permutation[positions]
        return np.split(rows, np.cumsum([hi - lo for lo, hi in parts])[:-1]) if parts else []
