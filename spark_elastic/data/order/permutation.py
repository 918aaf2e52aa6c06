"""Keyed permutations of range(rows) that are computed, not stored, and the orders of an epoch that are made of one.

`GlobalOrder` is the order "global" of a `BatchReader`; `EpochOrder` the order of `ElasticSampler` and `ElasticDataset`.

Small permutations sort hashes. Larger ones are a Feistel network over a grid of about √rows × √rows cells: a position
is a cell (line, column), and each round moves one coordinate around its ring by a distance that a table of hashes gives
for the other coordinate. The tables have √rows entries each, so they stay in the processor's cache, and a billion rows
cost 4 MB. The grid has hardly more cells than there are rows, so almost no cell lies outside of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from spark_elastic.data.order.shares import Shares, part_of

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_SORTED = 4096  # up to this many rows hashes are sorted: a true shuffle, cheap enough at this size
_ROUNDS = 4
"""Enough for a pseudo-random permutation if the tables are random (Luby, Rackoff 1988). Two more rounds cost 3 ns a row
and improve nothing that the tests can see; with three, batch means already vary by some per cent too much."""
BLOCK = 1 << 14  # positions computed at a time, so that all buffers fit into a core's second-level cache

# The splitmix64 generator (Steele, Lea, Flood 2014): of single numbers, and of arrays.

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def splitmix64(state: int) -> int:
    """Return the first output of the splitmix64 stream that starts at `state`."""
    z = (state + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def mixed(z: Words) -> Words:
    """Apply the output function of splitmix64 to an array of states."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return z ^ (z >> np.uint64(31))


def hashes(key: int, start: int, stop: int) -> Words:
    """Return outputs `start`..`stop` of the splitmix64 stream that starts at `key`."""
    z = np.arange(start + 1, stop + 1, dtype=np.uint64)
    z *= np.uint64(_GAMMA)
    z += np.uint64(key & _MASK)
    return mixed(z)


def seeded_key(seed: int, number: int) -> int:
    """Return the key of one epoch, or one partition, under a seed; both may be negative."""
    return splitmix64(splitmix64(seed & _MASK) ^ (number & _MASK))


def derived_key(*parts: int) -> int:
    """Combine integers, which may be negative, into one 64-bit key. Their order matters."""
    key = 0
    for part in parts:
        key = splitmix64(key ^ splitmix64(part & _MASK))
    return key


class Permutation:
    """A bijection of range(rows), made of `key`. Those of one thread may share a `scratch` of shape (3, BLOCK)."""

    def __init__(self, rows: int, key: int, scratch: Indices | None = None) -> None:
        self.rows = rows
        self._sorted: Indices | None = None
        if rows <= _SORTED:
            self._sorted = np.argsort(hashes(key, 0, rows), kind="stable").astype(np.int64)
            return
        lines = math.isqrt(rows - 1) + 1
        columns = -(-rows // lines)
        steps: list[Indices] = []
        end = 0
        for number in range(_ROUNDS):  # even rounds move the line by a distance that depends on the column
            ring, other = (lines, columns) if number % 2 == 0 else (columns, lines)
            values = hashes(key, end, end + other) >> np.uint64(32)
            steps.append(((values * np.uint64(ring)) >> np.uint64(32)).astype(np.int64))
            end += other
        # Coordinates are not reduced modulo their ring after each move. Instead the tables are repeated, as often as a
        # coordinate can have gone around by then, and the last two tables reduce them.
        self._first = steps[0]
        self._steps = [np.tile(step, times) for step, times in zip(steps[1:], (2, 2, 3), strict=True)]
        self._lines = np.tile(np.arange(0, lines * columns, columns), 3)
        self._columns = np.tile(np.arange(columns), 3)
        self._scratch = np.empty((3, BLOCK), np.int64) if scratch is None else scratch

    def __getitem__(self, positions: Indices) -> Indices:
        """Return the rows at these positions, shape (n,). Positions must be in range(rows)."""
        if self._sorted is not None:
            return self._sorted[positions]
        out = np.empty(len(positions), np.int64)
        columns = len(self._first)
        for start in range(0, len(positions), BLOCK):
            part = positions[start : start + BLOCK]
            line, column, step = (row[: len(part)] for row in self._scratch)
            np.floor_divide(part, columns, out=line)
            np.multiply(line, columns, out=column)
            np.subtract(part, column, out=column)
            np.take(self._first, column, out=step, mode="clip")  # other modes buffer `out`
            np.add(line, step, out=line)
            for number, table in enumerate(self._steps):
                moved, other = (column, line) if number % 2 == 0 else (line, column)
                np.take(table, other, out=step, mode="clip")
                np.add(moved, step, out=moved)
            rows = out[start : start + BLOCK]
            np.take(self._lines, line, out=step, mode="clip")
            np.take(self._columns, column, out=rows, mode="clip")
            np.add(rows, step, out=rows)
            if int(rows.max()) >= self.rows:
                # the few cells beyond the last row follow their cycle until it meets a row: a bijection still
                outside = np.flatnonzero(rows >= self.rows)
                rows[outside] = self[rows[outside]]
        return out


class GlobalOrder:
    """One permutation of all rows. A rank takes its contiguous part of each batch."""

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.rows = rows
        self.shuffle = shuffle
        self._permutation = Permutation(rows, derived_key(seed, epoch)) if shuffle else None

    def take(self, edges: Sequence[int], rank: int, size: int, shares: Shares = None) -> tuple[Indices, list[int]]:
        """Return a rank's rows of the global batches `[edges[0], edges[1])`, `[edges[1], edges[2])`, ... of positions.

        The rows of all batches come one batch's after another's, with the number of rows in each batch.
        """
        first, last, whole = part_of(rank, size, shares)
        parts = [
            (start + (stop - start) * first // whole, start + (stop - start) * last // whole)
            for start, stop in pairwise(edges)
        ]
        counts = [stop - start for start, stop in parts]
        positions = np.concatenate([np.arange(start, stop) for start, stop in parts])
        return positions if self._permutation is None else self._permutation[positions], counts


# --- the order of ElasticSampler and ElasticDataset -------------------------------------------------
#
# After `done` rows of an epoch, the rest is dealt to the ranks in turns: rank r of S takes positions done + r,
# done + r + S, ... After any number of equal batches on every rank, the rows done are again a prefix of the order, so
# one number describes them.

_EPOCH_ROUNDS = 6


class EpochOrder:
    """The order of one epoch: random access to a keyed permutation of range(rows), in constant memory.

    A balanced Feistel network over the next even number of bits. Values outside of range(rows) follow their cycle until
    it meets one inside, so the result is a bijection for every row count. `Permutation` is faster, but training states
    that users saved hold positions of this order, so its rows must never change.
    """

    def __init__(self, rows: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.rows = rows
        self.shuffle = shuffle
        self._half = max(1, ((max(rows - 1, 1)).bit_length() + 1) // 2)
        self._keys = []
        key = seeded_key(seed, epoch)
        for _ in range(_EPOCH_ROUNDS):
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
