"""The order of `ElasticSampler` and `ElasticDataset`, and each rank's share of an epoch: arithmetic on counts.

After `done` rows of an epoch, the rest is dealt to the ranks in turns: rank r of S takes positions done + r,
done + r + S, ... After any number of equal batches on every rank, the rows done are again a prefix of the order, so one
number describes them.
"""

from __future__ import annotations

import numpy as np

from spark_elastic.data.order.permutation import Indices, Words, mixed, seeded_key, splitmix64

_ROUNDS = 6


class EpochOrder:
    """The order of one epoch: random access to a keyed permutation of range(rows), in constant memory.

    A balanced Feistel network over the next even number of bits. Values outside of range(rows) follow their cycle until
    it meets one inside, so the result is a bijection for every row count. `Permutation` is faster, but training states
    that users saved hold positions of this order, so its rows must never change.
    """

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        if rows < 0:
            raise ValueError(f"rows must be at least 0, not {rows}")
        self.rows = rows
        self.shuffle = shuffle
        self._half = max(1, ((max(rows - 1, 1)).bit_length() + 1) // 2)
        self._keys = []
        key = seeded_key(seed, epoch)
        for _ in range(_ROUNDS):
            key = splitmix64(key)
            self._keys.append(np.uint64(key))

    def __getitem__(self, positions: Indices) -> Indices:
        """Return the rows at these positions. Positions must be in range(rows)."""
        if not self.shuffle:
            return positions
        out = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(out >= self.rows)
        while outside.size:
            out[outside] = self._permute(out[outside])
            outside = outside[out[outside] >= self.rows]
        return out.astype(np.int64)

    def _permute(self, values: Words) -> Words:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right + key) & mask)
        return (left << half) | right


def share(left: int, rank: int, size: int) -> int:
    """Return how many of the `left` rows a rank takes; shares differ by at most one row."""
    return (left - rank + size - 1) // size if left > rank else 0


def needs_padding(left: int, rank: int, size: int, batch_size: int | None, passes: int = 1) -> bool:
    """Return whether this rank must read one row twice to make as many steps as the others.

    Shares differ by at most one row. If this rank's share ends exactly with a batch and another share has one row more,
    that rank makes one more step, whose collectives this rank has to join. A batch may be processed in several equal
    `passes`, each with its own collectives. Without a batch size nothing is padded.
    """
    if not batch_size or left <= 0 or left % size == 0:
        return False
    low = left // size
    part = batch_size // passes if batch_size % passes == 0 else batch_size
    return low % part == 0 and rank >= left % size


def rows_done(rows: int, done: int, taken: int, rank: int, size: int, padded: bool) -> int:
    """Return the rows of the epoch that are done after this rank took `taken` rows of its share.

    `done` rows were done when the shares were dealt, and all ranks are at the same batch. A rank that took its whole
    share, with the padding, knows that the epoch is complete.
    """
    left = rows - done
    if taken and taken >= share(left, rank, size) + padded:
        return rows
    return min(rows, done + taken * size)
