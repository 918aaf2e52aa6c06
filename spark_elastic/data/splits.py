"""Which rows are set aside for validation: a hash of where they lie, so that a repeated task decides alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spark_elastic.core.permutation import hashes
from spark_elastic.core.sampling import splitmix64


def set_aside(fraction: float, seed: int, partition: int, first_row: int, rows: int) -> npt.NDArray[np.bool_]:
    """Whether each of `rows` rows of a partition, from `first_row` on, is for validation. bool, shape (rows,)."""
    key = splitmix64(splitmix64(seed & (1 << 64) - 1) ^ partition)
    return hashes(key, first_row, first_row + rows) < np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))
