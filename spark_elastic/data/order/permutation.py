"""A keyed permutation of range(rows) that is computed, not stored: any part of it, in any order, at 6 ns a row.

Small ones are sorted hashes. Larger ones are a Feistel network over a grid of about √rows × √rows cells: a position is
a cell (line, column); each round moves one coordinate around its ring by a distance that a table of hashes gives for
the other coordinate. The tables have √rows entries each, so they stay in the processor's cache, and a billion rows
cost 4 MB; and because the grid has hardly more cells than there are rows, next to nothing falls outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spark_elastic.data.order.sampling import Indices, splitmix64

_SORTED = 4096
"""Rows up to which hashes are sorted: a true shuffle, cheap enough at this size."""
_ROUNDS = 4
"""Enough for a pseudo-random permutation where the tables are random (Luby, Rackoff 1988). Two more cost 3 ns a row and
improve nothing that the tests can see; with three, batch means already vary by some per cent too much."""
_BLOCK = 1 << 14
"""Positions worked on at a time: what all steps touch fits into a core's second-level cache."""

_LONG_LINE = 512
"""Cells in a line above which calls for a line each cost less than what they save."""

Words = npt.NDArray[np.uint64]


def hashes(key: int, start: int, stop: int) -> Words:
    """Outputs `start`..`stop` of the splitmix64 stream that `key` begins; uint64, shape (stop - start,)."""
    z = np.arange(start + 1, stop + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key & ((1 << 64) - 1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derived_key(*parts: int) -> int:
    """One 64-bit key from several integers, which may be negative; their order matters."""
    key = 0
    for part in parts:
        key = splitmix64(key ^ splitmix64(part & ((1 << 64) - 1)))
    return key


def make_scratch() -> Indices:
    """Memory that permutations need while they compute."""
    return np.empty((3, _BLOCK), np.int64)


class Permutation:
    """A bijection of range(rows), a function of (rows, key) alone.

    scratch: from `make_scratch()`; permutations that one thread uses may share it. None: one of its own.

    Raises: ValueError: rows < 0.
    """

    def __init__(self, rows: int, key: int, scratch: Indices | None = None) -> None:
        if rows < 0:
            raise ValueError(f"rows must not be negative, not {rows}")
        self.rows = rows
        self._sorted: Indices | None = None
        if rows <= _SORTED:
            self._sorted = np.argsort(hashes(key, 0, rows), kind="stable").astype(np.int64)
            return
        lines = math.isqrt(rows - 1) + 1
        columns = -(-rows // lines)
        steps: list[Indices] = []
        end = 0
        for turn in range(_ROUNDS):  # even turns move the line, by what the column says
            ring, other = (lines, columns) if turn % 2 == 0 else (columns, lines)
            values = hashes(key, end, end + other) >> np.uint64(32)
            steps.append(((values * np.uint64(ring)) >> np.uint64(32)).astype(np.int64))
            end += other
        # Coordinates are not brought back into their ring after each move: the tables repeat instead, as often as a
        # coordinate can have gone around by then, and the last two bring them back.
        self._first = steps[0]
        self._steps = [np.tile(step, times) for step, times in zip(steps[1:], (2, 2, 3), strict=True)]
        self._lines = np.tile(np.arange(0, lines * columns, columns), 3)
        self._columns = np.tile(np.arange(columns), 3)
        self._scratch = make_scratch() if scratch is None else scratch

    def __getitem__(self, positions: Indices) -> Indices:
        """What stands at these positions, which must lie in range(rows); int64, same shape `(n,)`."""
        if self._sorted is not None:
            return self._sorted[positions]
        out = np.empty(len(positions), np.int64)
        columns = len(self._first)
        for start in range(0, len(positions), _BLOCK):
            part = positions[start : start + _BLOCK]
            line, column, step = (row[: len(part)] for row in self._scratch)
            np.floor_divide(part, columns, out=line)
            np.multiply(line, columns, out=column)
            np.subtract(part, column, out=column)
            np.take(self._first, column, out=step, mode="clip")  # other modes buffer `out`
            np.add(line, step, out=line)
            self._finish(line, column, step, out[start : start + _BLOCK])
        return out

    def span(self, start: int, stop: int) -> Indices:
        """The same as `self[np.arange(start, stop)]`, a little faster."""
        if self._sorted is not None:
            return self._sorted[start:stop]
        columns = len(self._first)
        if columns < _LONG_LINE:
            return self[np.arange(start, stop)]
        out = np.empty(stop - start, np.int64)
        for begin in range(start, stop, _BLOCK):
            line, column, step = (row[: min(_BLOCK, stop - begin)] for row in self._scratch)
            number, first = divmod(begin, columns)
            filled = 0
            while filled < len(line):  # along lines: neither a division nor a look-up is needed for the first step
                length = min(len(line) - filled, columns - first)
                np.add(self._first[first : first + length], number, out=line[filled : filled + length])
                column[filled : filled + length] = self._columns[first : first + length]
                filled, number, first = filled + length, number + 1, 0
            self._finish(line, column, step, out[begin - start : begin - start + _BLOCK])
        return out

    def _finish(self, line: Indices, column: Indices, step: Indices, out: Indices) -> None:
        """All moves after the first one."""
        for turn, table in enumerate(self._steps):
            moved, other = (column, line) if turn % 2 == 0 else (line, column)
            np.take(table, other, out=step, mode="clip")
            np.add(moved, step, out=moved)
        np.take(self._lines, line, out=step, mode="clip")
        np.take(self._columns, column, out=out, mode="clip")
        np.add(out, step, out=out)
        if int(out.max()) < self.rows:
            return
        # the few cells that are no rows walk on along their cycle until they are some: it stays a bijection
        outside = np.flatnonzero(out >= self.rows)
        out[outside] = self[out[outside]]


# The orders in which an epoch's rows come, and which of them a rank takes of a global batch.
#
# Both are functions of (rows, seed, epoch) and settings that are the same on all ranks; neither depends on the number
# of ranks. An epoch's state is one integer, the position up to which its order is done.


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
