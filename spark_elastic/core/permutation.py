"""A keyed permutation of range(rows) that is computed, not stored: any part of it, in any order, at 8 ns a row.

Small ones are sorted hashes. Larger ones are a Feistel network over a grid of about √rows × √rows cells: a position is
a cell (line, column); each round moves one coordinate around its ring by a distance that a table of hashes gives for
the other coordinate. The tables have √rows entries each, so they stay in the processor's cache and cost 1.5 MB for a
billion rows; and because the grid has hardly more cells than there are rows, next to nothing falls outside of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.core.sampling import Indices, splitmix64

_SORTED = 4096
"""Rows up to which hashes are sorted: a true shuffle, cheap enough at this size."""
_ROUNDS = 4
"""Enough for a pseudo-random permutation where the tables are random (Luby, Rackoff 1988). Two more cost 3 ns a row and
improve nothing that the tests can see; with three, batch means already vary by some per cent too much."""
_BLOCK = 1 << 14
"""Positions worked on at a time: what all steps touch fits into a core's second-level cache."""

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


def make_scratch() -> Words:
    """Memory that permutations need while they compute."""
    return np.empty((3, _BLOCK), np.uint64)


class Permutation:
    """A bijection of range(rows), a function of (rows, key) alone.

    scratch: from `make_scratch()`; permutations that one thread uses may share it. None: one of its own.

    Raises: ValueError: rows < 0.
    """

    def __init__(self, rows: int, key: int, scratch: Words | None = None) -> None:
        if rows < 0:
            raise ValueError(f"rows must not be negative, not {rows}")
        self.rows = rows
        self._sorted: Indices | None = None
        if rows <= _SORTED:
            self._sorted = np.argsort(hashes(key, 0, rows), kind="stable").astype(np.int64)
            return
        lines = math.isqrt(rows - 1) + 1
        columns = -(-rows // lines)
        self._rings = (np.uint64(lines), np.uint64(columns))
        self._tables: list[Words] = []
        end = 0
        for turn in range(_ROUNDS):  # even turns move the line, by what the column says
            ring, other = (lines, columns) if turn % 2 == 0 else (columns, lines)
            table = hashes(key, end, end + other)
            self._tables.append(((table >> np.uint64(32)) * np.uint64(ring)) >> np.uint64(32))
            end += other
        self._scratch = make_scratch() if scratch is None else scratch

    def __getitem__(self, positions: Indices) -> Indices:
        """What stands at these positions, which must lie in range(rows); int64, same shape `(n,)`."""
        out = np.empty(len(positions), np.int64)
        if self._sorted is not None:
            np.take(self._sorted, positions, out=out, mode="clip")
            return out
        for start in range(0, len(positions), _BLOCK):
            self._walk(positions[start : start + _BLOCK], out[start : start + _BLOCK])
        return out

    def _walk(self, positions: Indices, out: Indices) -> None:
        """Cells outside of range(rows) walk on along their cycle until they are inside: still a bijection."""
        self._permute(positions, out)
        if int(out.max()) < self.rows:
            return
        outside = np.flatnonzero(out >= self.rows)
        while outside.size:
            again = out[outside]
            self._permute(again, again)
            out[outside] = again
            outside = outside[again >= self.rows]

    def _permute(self, positions: Indices, out: Indices) -> None:
        moved, other, step = (part[: len(positions)] for part in self._scratch)
        columns = self._rings[1]
        cells: Any = positions.view(np.uint64)
        np.floor_divide(cells, columns, out=moved)
        np.multiply(moved, columns, out=other)
        np.subtract(cells, other, out=other)
        for turn, table in enumerate(self._tables):
            np.take(table, other.view(np.int64), out=step, mode="clip")  # other modes buffer `out`
            np.add(moved, step, out=moved)
            # modulo the ring: where nothing has to be subtracted the difference wraps to something huge
            np.subtract(moved, self._rings[turn % 2], out=step)
            np.minimum(moved, step, out=moved)
            moved, other = other, moved
        result: Any = out.view(np.uint64)
        np.multiply(moved, columns, out=result)
        np.add(result, other, out=result)
