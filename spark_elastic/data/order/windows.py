"""The order for sets that are larger than memory, or far away: shuffled well, read in chunks, resumed anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spark_elastic.data.order.permutation import Permutation, derived_key, make_scratch
from spark_elastic.data.order.sampling import Indices

_PLANNED = 1 << 19
"""Rows whose places in the lanes are computed at a time: what a resume costs, some ms and 4 MB."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """How a set is read in lanes; the same on every rank and for all of a training.

    lanes: that positions are dealt out to in turns. chunk_rows: neighbours that are read together.
    window_rows: rows of a lane that are shuffled among themselves; as many as the lane has, or more: all of them.
    """

    lanes: int
    chunk_rows: int
    window_rows: int


def _reversed(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0


@dataclass(frozen=True, slots=True)
class _Window:
    """number: of the window in its lane. order: of its rows. first: where its first row is, counted from the start of
    the first chunk that it touches. chunks: the first rows of the chunks that it touches; None: the short one is among
    them, and `first` is a place on the tape.
    """

    number: int
    order: Permutation
    first: int
    chunks: Indices | None


class LaneOrder:
    """Rows in chunks, chunks shuffled into a tape, the tape cut into lanes, each lane shuffled window by window.

    Position p is row number p div P of a lane that p mod P names, and a rank owns a contiguous run of lanes: so it
    touches only its share of the chunks, and of those only what the windows that are open now cover. Lanes are dealt
    out in bit-reversed order, so that any few consecutive positions are spread evenly over all runs of lanes: ranks
    have nearly equal shares of batches of any size. The lanes' windows end at different times, so that chunks are
    needed one after another, not all at once.
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
        bits = (settings.lanes - 1).bit_length()
        # turns[i]: the lane of the positions p with p mod P = i
        self._turns = np.array(sorted(range(settings.lanes), key=lambda lane: _reversed(lane, bits)), np.int64)
        longer = np.zeros(settings.lanes, np.int64)
        longer[self._turns[: rows % settings.lanes]] = 1
        self._lengths = (rows // settings.lanes + longer).tolist()
        self._begins = (np.cumsum(self._lengths) - self._lengths).tolist()
        self._share = (-1, -1)
        self._mine: Indices = np.empty(0, np.int64)
        self._until: list[int] = []
        self._windows: dict[int, _Window] = {}
        self._plan = np.empty((0, 0), np.int64)
        self._planned = (0, 0, 0)

    # --- lanes and windows --------------------------------------------------------------------

    def owned(self, rank: int, size: int) -> tuple[int, int]:
        """The lanes `[first, last)` of a rank; none where there are more ranks than lanes."""
        lanes = self.settings.lanes
        return lanes * rank // size, lanes * (rank + 1) // size

    def lane(self, lane: int) -> tuple[int, int]:
        """Where on the tape a lane begins, and how many rows it has."""
        return self._begins[lane], self._lengths[lane]

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

    def _own(self, first: int, last: int) -> None:
        """Note whose turn is whose, for the lanes `[first, last)`."""
        mine = (self._turns >= first) & (self._turns < last)
        self._mine = self._turns[mine] - first
        self._until = [0, *np.cumsum(mine).tolist()]
        self._share = (first, last)

    def _before(self, position: int, first: int, last: int) -> int:
        """Positions below `position` that belong to the lanes `[first, last)`."""
        if self._share != (first, last):
            self._own(first, last)
        index, turn = divmod(position, self.settings.lanes)
        return index * (last - first) + self._until[turn]

    def _sequence(self, first: int, last: int, start: int, stop: int) -> Indices:
        """Number `start`..`stop` of the rows of these lanes, in the order of their positions."""
        lanes = last - first
        if start == stop:
            return np.empty(0, np.int64)
        depth = max(1, _PLANNED // lanes)
        parts = []
        index, end = start // lanes, -(-stop // lanes)
        while index < end:
            block = index // depth
            if self._planned != (first, last, block):
                self._plan = np.zeros((lanes, depth), np.int64)
                for lane in range(first, last):
                    self._fill(lane, block * depth, self._plan[lane - first])
                self._planned = (first, last, block)
            until = min(end, (block + 1) * depth)
            plan = self._plan[self._mine, index - block * depth : until - block * depth]
            parts.append(plan.T.reshape(-1))
            index = until
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows[start % lanes : start % lanes + stop - start]

    def _fill(self, lane: int, index: int, out: Indices) -> None:
        """A lane's rows from number `index` on; past its end `out` stays as it is."""
        end = min(index + len(out), self.lane(lane)[1])
        at = index
        while at < end:
            number, start, stop = self.window_at(lane, at)
            until = min(stop, end)
            window = self._windows.get(lane)
            if window is None or window.number != number:
                window = self._windows[lane] = self._window(lane, number, start, stop)
            positions = window.order.span(at - start, until - start)
            out[at - index : until - index] = self._rows_in(window, positions)
            at = until

    def _window(self, lane: int, number: int, start: int, stop: int) -> _Window:
        begin = self.lane(lane)[0]
        first, last = begin + start, begin + stop
        order = Permutation(stop - start, derived_key(self._key, 3, lane, number), self._scratch)
        after = self._short_at + self._short
        if self._short and first < after and last > self._short_at:
            return _Window(number, order, first, None)
        if first >= after:
            first, last = first - self._short, last - self._short
        chunk = self.settings.chunk_rows
        slots = np.arange(first // chunk, -(-last // chunk))
        return _Window(number, order, first % chunk, self._chunks[slots] * chunk)

    def _rows_in(self, window: _Window, positions: Indices) -> Indices:
        places = positions + window.first
        if window.chunks is None:
            return self._rows_on_tape(places)
        slots = places // self.settings.chunk_rows
        places -= slots * self.settings.chunk_rows
        places += window.chunks[slots]
        return places

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
