"""The order for sets that are larger than memory, or far away: shuffled well, read in chunks, resumed anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spark_elastic.core.permutation import Permutation, derived_key, make_scratch
from spark_elastic.core.sampling import Indices

_PLANNED = 1 << 18
"""Rows whose places in the lanes are computed at a time, in a few ms: what a resume costs, and 2 MB."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How a set is read in lanes; the same on every rank and for all of a training.

    lanes: positions p = lane (mod lanes) belong to a lane. chunk_rows: neighbours that are read together.
    window_rows: rows of a lane that are shuffled among themselves; as many as the lane has, or more: all of them.
    """

    lanes: int
    chunk_rows: int
    window_rows: int


class LaneOrder:
    """Rows in chunks, chunks shuffled into a tape, the tape cut into lanes, each lane shuffled window by window.

    Position p is lane p mod P's row number p div P, and a rank owns a contiguous run of lanes: so it touches only its
    share of the chunks, and of those only what the windows that are open now cover. The lanes' windows end at
    different times, so that chunks are needed one after another, not all at once.
    """

    def __init__(self, rows: int, seed: int, epoch: int, settings: LaneSettings) -> None:
        self.rows = rows
        self.settings = settings
        self._key = derived_key(seed, epoch, 1)
        self._scratch = make_scratch()
        full, self._short = divmod(rows, settings.chunk_rows)
        self._chunks = Permutation(full, derived_key(self._key, 1), self._scratch)
        # a last chunk that is short stands anywhere on the tape, like any other
        self._short_at = derived_key(self._key, 2) % (full + 1) * settings.chunk_rows
        self._windows: dict[int, tuple[int, Permutation]] = {}
        self._plan = np.empty((0, 0), np.int64)
        self._planned = (0, 0, 0)

    # --- lanes and windows --------------------------------------------------------------------

    def owned(self, rank: int, size: int) -> tuple[int, int]:
        """The lanes `[first, last)` of a rank; none where there are more ranks than lanes."""
        lanes = self.settings.lanes
        return lanes * rank // size, lanes * (rank + 1) // size

    def lane(self, lane: int) -> tuple[int, int]:
        """Where on the tape a lane begins, and how many rows it has."""
        rows, longer = divmod(self.rows, self.settings.lanes)
        return lane * rows + min(lane, longer), rows + (lane < longer)

    def window_at(self, lane: int, index: int) -> tuple[int, int, int]:
        """The window around a lane's row number `index`: its number, and the lane's rows `[start, stop)` it covers."""
        length, window = self.lane(lane)[1], self.settings.window_rows
        if window >= length:
            return 0, 0, length
        # the first one is longer or shorter by up to a half: neighbouring lanes are out of step
        first = max(1, window // 2 + int(window * (lane * _GOLDEN % 1)))
        if index < first:
            return 0, 0, min(first, length)
        number = (index - first) // window
        start = first + number * window
        return number + 1, start, min(start + window, length)

    def window_ranges(self, lane: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges of rows, `[start, stop)` each, that a lane's rows number `start`..`stop` come from."""
        begin = self.lane(lane)[0]
        chunk = self.settings.chunk_rows
        first, last = begin + start, begin + stop
        cuts = [self._short_at, self._short_at + self._short]
        edges = np.arange(first - first % chunk, last + chunk, chunk)
        after = edges + self._short
        cuts = sorted({first, last, *cuts, *edges.tolist(), *after.tolist()})
        cuts = [cut for cut in cuts if first <= cut <= last]
        begins = self._rows_on_tape(np.array(cuts[:-1], np.int64))
        ranges: list[tuple[int, int]] = []
        for row, cut, end in zip(begins.tolist(), cuts[:-1], cuts[1:], strict=True):
            if ranges and ranges[-1][1] == row:
                ranges[-1] = (ranges[-1][0], row + end - cut)
            else:
                ranges.append((row, row + end - cut))
        return ranges

    # --- rows ---------------------------------------------------------------------------------

    def take(self, edges: Sequence[int], rank: int, size: int) -> tuple[Indices, list[int]]:
        first, last = self.owned(rank, size)
        ends = [self._before(edge, first, last) for edge in edges]
        return self._sequence(first, last, ends[0], ends[-1]), [stop - start for start, stop in pairwise(ends)]

    def _before(self, position: int, first: int, last: int) -> int:
        """Positions below `position` that belong to the lanes `[first, last)`."""
        index, lane = divmod(position, self.settings.lanes)
        return index * (last - first) + min(max(lane - first, 0), last - first)

    def _sequence(self, first: int, last: int, start: int, stop: int) -> Indices:
        """Number `start`..`stop` of the rows of these lanes, in the order of their positions."""
        if start == stop:
            return np.empty(0, np.int64)
        lanes = last - first
        depth = max(1, _PLANNED // lanes)
        parts = []
        while start < stop:
            block = start // (lanes * depth)
            if self._planned != (first, last, block):
                self._plan = self._planned_block(first, last, block * depth, depth)
                self._planned = (first, last, block)
            base = block * lanes * depth
            end = min(stop, base + lanes * depth)
            parts.append(self._plan.reshape(-1)[start - base : end - base])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _planned_block(self, first: int, last: int, index: int, depth: int) -> Indices:
        """Rows number `index`..`index + depth` of the lanes; shape (depth, lanes). Past a lane's end: undefined."""
        tape = np.zeros((last - first, depth), np.int64)
        for lane in range(first, last):
            begin, length = self.lane(lane)
            at, end = index, min(index + depth, length)
            while at < end:
                number, start, stop = self.window_at(lane, at)
                until = min(stop, end)
                order = self._window(lane, number, stop - start)
                tape[lane - first, at - index : until - index] = order[np.arange(at - start, until - start)]
                tape[lane - first, at - index : until - index] += begin + start
                at = until
        return self._rows_on_tape(np.ascontiguousarray(tape.T).reshape(-1)).reshape(depth, last - first)

    def _window(self, lane: int, number: int, rows: int) -> Permutation:
        held, permutation = self._windows.get(lane, (-1, None))
        if permutation is None or held != number:
            permutation = Permutation(rows, derived_key(self._key, 3, lane, number), self._scratch)
            self._windows[lane] = (number, permutation)
        return permutation

    def _rows_on_tape(self, tape: Indices) -> Indices:
        chunk = self.settings.chunk_rows
        if not self._chunks.rows:
            return tape
        behind = tape >= self._short_at + self._short
        offsets = tape - behind * self._short
        # what lies in the short chunk would be looked up past the last full one
        slots = np.minimum(offsets // chunk, self._chunks.rows - 1)
        rows: Indices = self._chunks[slots] * chunk + (offsets - slots * chunk)
        inside = np.flatnonzero((tape >= self._short_at) & ~behind)
        rows[inside] = self._chunks.rows * chunk + tape[inside] - self._short_at
        return rows
