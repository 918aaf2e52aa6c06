"""The windowed shuffle, `order="lanes"`: for datasets that are larger than memory, or remote.

Rows are read in chunks of neighbours, well shuffled, and an epoch can be entered at any position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spark_elastic.data.order.permutation import BLOCK, GlobalOrder, Indices, Permutation, derived_key
from spark_elastic.data.order.shares import Shares, part_of

_CHUNK_BYTES = 256 << 10  # bytes of a chunk: reads of this size get most of what a disk or an object store can deliver
_OPEN_BYTES = 1 << 30
"""Bytes of the open windows of all streams: 4096 chunks. With sorted data the rows of a batch of n vary like
1 + n / chunks times those of a true shuffle: 1.25 for a batch of 1024. It is page cache, which the ranks share."""
_STREAMS = 128  # several for each worker: their shares are nearly equal whatever their number
_MANY_ROWS = 1 << 23  # from here on there are twice as many streams: shorter ones are slow to compute
_PLANNED = 1 << 19  # rows whose places are computed at a time. A resume pays for one such block: some ms and 4 MB
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """The sizes of a shuffle, equal on all ranks for a whole training. Checkpoints hold these field names."""

    lanes: int  # the number of streams
    chunk_rows: int  # neighbouring rows that are read together
    window_rows: int  # rows of a stream that are shuffled among themselves; at least the stream's rows: all of them


def window_settings(rows: int, stride: int, *, open_bytes: int = _OPEN_BYTES) -> WindowSettings:
    """Return the settings for a dataset. They do not depend on the batch size, which may change with the world.

    The open windows of all streams together cover at most `open_bytes`. `stride` is the bytes of a record.
    """
    streams = _STREAMS if rows < _MANY_ROWS else 2 * _STREAMS
    chunk_rows = max(1, min(_CHUNK_BYTES // stride, -(-rows // (4 * streams)) or 1))
    return WindowSettings(streams, chunk_rows, max(chunk_rows, open_bytes // stride // streams))


@dataclass(frozen=True, slots=True)
class _Window:
    """The window of a stream that rows are taken from."""

    number: int
    order: Permutation
    first: int  # the place of its first row, counted from the start of the first chunk that it touches
    # The first rows of the chunks that it touches. None: it touches the short chunk, and `first` is a place in the
    # chunk sequence.
    chunks: Indices | None


class WindowedShuffle:
    """Chunks of rows in shuffled sequence, the sequence cut into streams, each stream shuffled window by window.

    With S streams, position p is row p div S of the stream that p mod S selects. A rank owns a contiguous range of
    streams, so it reads only its share of the chunks, and of those only what the open windows cover. Positions are
    dealt to the streams in bit-reversed order: any few consecutive positions are spread evenly over all ranges of
    streams, so ranks have nearly equal shares of batches of any size. The windows of different streams end at different
    times, so that new chunks are needed one after another, not all at once.
    """

    def __init__(self, rows: int, seed: int, epoch: int, settings: WindowSettings) -> None:
        self.rows = rows
        self.settings = settings
        self._key = derived_key(seed, epoch, 1)
        self._scratch = np.empty((3, BLOCK), np.int64)
        full, self._short = divmod(rows, settings.chunk_rows)
        self._chunks = Permutation(full, derived_key(self._key, 1), self._scratch)
        # a short last chunk may be anywhere in the sequence, like any other
        self._short_at = derived_key(self._key, 2) % (full + 1) * settings.chunk_rows
        bits = (settings.lanes - 1).bit_length()
        # _turns[i]: the stream of the positions p with p mod S = i, in the order of the reversed bits
        self._turns = np.array(sorted(range(settings.lanes), key=lambda s: f"{s:0{bits}b}"[::-1]), np.int64)
        longer = np.zeros(settings.lanes, np.int64)
        longer[self._turns[: rows % settings.lanes]] = 1
        self.lengths = (rows // settings.lanes + longer).tolist()  # of each stream, its number of rows
        self._begins = (np.cumsum(self.lengths) - self.lengths).tolist()  # and where it begins in the chunk sequence
        self._owned = (-1, -1)
        self._owned_turns: Indices = np.empty(0, np.int64)
        self._owned_before: list[int] = []
        self._windows: dict[int, _Window] = {}
        self._plan = np.empty((0, 0), np.int64)
        self._planned = (0, 0, 0)

    def owned(self, rank: int, size: int, shares: Shares = None) -> tuple[int, int]:
        """Return the streams `[first, last)` of a rank: none for some if there are more ranks than streams."""
        first, last, whole = part_of(rank, size, shares)
        return self.settings.lanes * first // whole, self.settings.lanes * last // whole

    def window_at(self, stream: int, index: int) -> tuple[int, int, int]:
        """Return the window around row `index` of a stream: its number, and its rows `[start, stop)` of the stream."""
        length, window = self.lengths[stream], self.settings.window_rows
        if window >= length:
            return 0, 0, length
        # the first one is longer or shorter by up to a half, so that neighbouring streams are out of step
        first = max(1, window // 2 + int(window * (stream * _GOLDEN_RATIO % 1)))
        if index < first:
            return 0, 0, min(first, length)
        number = (index - first) // window
        start = first + number * window
        return number + 1, start, min(start + window, length)

    def window_ranges(self, stream: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of rows, `[start, stop)` each, that rows `start`..`stop` of a stream are taken from."""
        begin = self._begins[stream]
        chunk = self.settings.chunk_rows
        first, last = begin + start, begin + stop
        edges = np.arange(first - first % chunk, last + chunk, chunk)
        cuts = {first, last, self._short_at, self._short_at + self._short, *edges.tolist()}
        cuts.update((edges + self._short).tolist())
        inside = sorted(cut for cut in cuts if first <= cut <= last)
        begins = self._rows_in_sequence(np.array(inside[:-1], np.int64))
        ranges: list[tuple[int, int]] = []
        for row, cut, end in zip(begins.tolist(), inside[:-1], inside[1:], strict=True):
            if ranges and ranges[-1][1] == row:
                ranges[-1] = (ranges[-1][0], row + end - cut)
            else:
                ranges.append((row, row + end - cut))
        return ranges

    def take(self, edges: Sequence[int], rank: int, size: int, shares: Shares = None) -> tuple[Indices, list[int]]:
        """Return a rank's rows of consecutive global batches, as `GlobalOrder.take`."""
        first, last = self.owned(rank, size, shares)
        if self._owned != (first, last):
            mine = (self._turns >= first) & (self._turns < last)
            self._owned_turns = self._turns[mine] - first
            self._owned_before = [0, *np.cumsum(mine).tolist()]
            self._owned = (first, last)
        ends = []  # for each edge, the positions below it that belong to the owned streams
        for edge in edges:
            index, turn = divmod(edge, self.settings.lanes)
            ends.append(index * (last - first) + self._owned_before[turn])
        return self._sequence(first, last, ends[0], ends[-1]), [stop - start for start, stop in pairwise(ends)]

    def _sequence(self, first: int, last: int, start: int, stop: int) -> Indices:
        """Return rows `start`..`stop` of the streams `[first, last)`, in the order of their positions."""
        streams = last - first
        if start == stop:
            return np.empty(0, np.int64)
        depth = max(1, _PLANNED // streams)
        parts = []
        index, end = start // streams, -(-stop // streams)
        while index < end:
            block = index // depth
            if self._planned != (first, last, block):
                self._plan = np.zeros((streams, depth), np.int64)
                for stream in range(first, last):
                    self._fill(stream, block * depth, self._plan[stream - first])
                self._planned = (first, last, block)
            until = min(end, (block + 1) * depth)
            plan = self._plan[self._owned_turns, index - block * depth : until - block * depth]
            parts.append(plan.T.reshape(-1))
            index = until
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows[start % streams : start % streams + stop - start]

    def _fill(self, stream: int, index: int, out: Indices) -> None:
        """Write the rows of a stream from `index` on to `out`, whose rest after the stream's end stays unchanged."""
        end = min(index + len(out), self.lengths[stream])
        at = index
        while at < end:
            number, start, stop = self.window_at(stream, at)
            until = min(stop, end)
            window = self._windows.get(stream)
            if window is None or window.number != number:
                window = self._windows[stream] = self._window(stream, number, start, stop)
            places = window.order[np.arange(at - start, until - start)] + window.first
            if window.chunks is None:
                places = self._rows_in_sequence(places)
            else:
                touched = places // self.settings.chunk_rows
                places -= touched * self.settings.chunk_rows
                places += window.chunks[touched]
            out[at - index : until - index] = places
            at = until

    def _window(self, stream: int, number: int, start: int, stop: int) -> _Window:
        begin = self._begins[stream]
        first, last = begin + start, begin + stop
        order = Permutation(stop - start, derived_key(self._key, 3, stream, number), self._scratch)
        after = self._short_at + self._short
        if self._short and first < after and last > self._short_at:
            return _Window(number, order, first, None)
        if first >= after:
            first, last = first - self._short, last - self._short
        chunk = self.settings.chunk_rows
        touched = np.arange(first // chunk, -(-last // chunk))
        return _Window(number, order, first % chunk, self._chunks[touched] * chunk)

    def _rows_in_sequence(self, places: Indices) -> Indices:
        """Return the numbers of the rows at these places of the shuffled sequence of chunks."""
        chunk = self.settings.chunk_rows
        if not self._chunks.rows:
            return places
        behind = places >= self._short_at + self._short
        offsets = places - behind * self._short
        # places in the short chunk would be looked up past the last full one; they are overwritten below
        touched = np.minimum(offsets // chunk, self._chunks.rows - 1)
        rows: Indices = self._chunks[touched] * chunk + (offsets - touched * chunk)
        inside = np.flatnonzero((places >= self._short_at) & ~behind)
        rows[inside] = self._chunks.rows * chunk + places[inside] - self._short_at
        return rows


Order = GlobalOrder | WindowedShuffle
"""The order of an epoch's rows, and each rank's part of a global batch: a function of (rows, seed, epoch) and settings,
never of the number of ranks. So the state of an epoch is one integer: the position up to which its rows are done."""
