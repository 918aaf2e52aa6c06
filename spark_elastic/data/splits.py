"""Which rows are set aside for validation: a hash of where they lie, so that a repeated task decides alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spark_elastic.core.sampling import splitmix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def set_aside(fraction: float, seed: int, partition: int, first_row: int, rows: int) -> npt.NDArray[np.bool_]:
    """Whether each of `rows` rows of a partition, from `first_row` on, is for validation. bool, shape (rows,)."""
    key = np.uint64(splitmix64(splitmix64(seed & (1 << 64) - 1) ^ partition))
    with np.errstate(over="ignore"):
        z = np.arange(first_row + 1, first_row + rows + 1, dtype=np.uint64) * _GOLDEN + key
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z < np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))
