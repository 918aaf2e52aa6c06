"""The order of an epoch's rows and who takes which: arithmetic on counts, no state.

One epoch is one permutation of the rows, a function of (seed, epoch, row count) alone. What is left of it after
`done` rows is dealt out in turns: rank r of S takes positions done + r, done + r + S, ... So after any number of
equal batches on every rank the rows done are again a prefix of the order, and one number says which.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ROUNDS = 6


def splitmix64(value: int) -> int:
    """One output of the splitmix64 generator (Steele, Lea, Flood 2014) for the given state."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _mix(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    z = values + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class EpochOrder:
    """The order of one epoch: random access to a keyed permutation of range(rows), in constant memory.

    A balanced Feistel network over the next even number of bits; values that fall outside of range(rows) walk on
    along their cycle until they are inside, so it is a bijection for every row count.

    Raises: ValueError: if rows < 0.
    """

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        if rows < 0:
            raise ValueError(f"rows must not be negative, not {rows}")
        self.rows = rows
        self.shuffle = shuffle
        self._half = max(1, ((max(rows - 1, 1)).bit_length() + 1) // 2)
        key = splitmix64(splitmix64(seed & _MASK) ^ (epoch & _MASK))
        self._keys = []
        for _ in range(_ROUNDS):
            key = splitmix64(key)
            self._keys.append(key)

    def __getitem__(self, positions: Indices) -> Indices:
        """The rows at these positions of the order; int64, same shape. Positions must lie in range(rows)."""
        if not self.shuffle:
            return positions
        out = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(out >= self.rows)
        while outside.size:
            out[outside] = self._permute(out[outside])
            outside = outside[out[outside] >= self.rows]
        return out.astype(np.int64)

    def _permute(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        with np.errstate(over="ignore"):
            for key in self._keys:
                left, right = right, left ^ (_mix(right, key) & mask)
        return (left << half) | right


def share(left: int, rank: int, size: int) -> int:
    """Rows that `rank` takes of the `left` rows still to do; differs by at most one between ranks."""
    return (left - rank + size - 1) // size if left > rank else 0


def needs_padding(left: int, rank: int, size: int, batch_size: int | None, passes: int = 1) -> bool:
    """Whether this rank's share ends a batch, or a part of one, earlier than other ranks'.

    Then, and only then, it has to see one row twice: its peers have one row each in a last step that no collective
    can complete without it. Shares differ by at most one row, so this is when a share fills its last batch exactly
    and another's has one row more. Without a batch size there is no telling, and no padding.

    passes: equal parts that a batch is worked through in, each with collectives of its own.
    """
    if not batch_size or left <= 0 or left % size == 0:
        return False
    low = left // size
    part = batch_size // passes if batch_size % passes == 0 else batch_size
    return low % part == 0 and rank >= left % size


def rows_done(rows: int, done: int, taken: int, rank: int, size: int, padded: bool) -> int:
    """Rows of the epoch that are done once this rank has taken `taken` rows since `done` rows were.

    All ranks are at the same batch. A rank that has taken its whole share knows that the epoch is complete.
    """
    left = rows - done
    if taken and taken >= share(left, rank, size) + padded:
        return rows
    return min(rows, done + taken * size)
