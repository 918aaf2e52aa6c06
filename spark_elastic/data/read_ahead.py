"""Has what is gathered next read before it is gathered, and lets go of it afterwards."""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from spark_elastic.data.order.permutation import GlobalOrder, Order
from spark_elastic.data.order.windows import LaneOrder
from spark_elastic.data.rows import Numbering

Ranges = list[tuple[int, int]]
"""Of rows by number, `[start, stop)` each."""


class Stopped(Exception):
    """The pass is over; nobody needs what was waited for."""


class Source(Protocol):
    """Where rows come from: files of this host, or a store far away.

    at_once: the set is small enough to be wanted as a whole, whatever the order.
    """

    at_once: bool

    def want(self, ranges: Ranges) -> Any:
        """Begin to bring these rows near. Returns what `wait` and `release` are to be given."""

    def wait(self, wanted: Any, stopping: Future[None]) -> None:
        """Until they are there. Raises: Stopped: `stopping` is done; DatasetError, StoreError: they cannot be had."""

    def release(self, wanted: Any) -> None:
        """They are not needed any more."""

    def want_all(self, stopping: Future[None]) -> None:
        """Bring all rows near, and wait until they can be gathered in any order. Again: nothing. Safe for threads."""


@dataclass(slots=True)
class _Held:
    """A window of a lane that is being read, or was. stop: the lane's row number that it ends before. Or a piece of the
    files: the position.
    """

    stop: int
    wanted: Any
    there: bool = False


class Ahead:
    """Follows one rank's way through an order: of each lane the open window is near, and the next on its way.

    Rows in the order of the files are wanted a few pieces at a time, and those of a permutation all at once: they come
    from everywhere. One for each pass.
    """

    def __init__(self, source: Source, numbering: Numbering, piece_rows: int = 1) -> None:
        self._source = source
        self._numbering = numbering
        self._piece_rows = piece_rows
        self._pieces: deque[_Held] = deque()
        self._stopping: Future[None] = Future()
        self._order: Order | None = None
        self._owned = (0, 0)
        self._held: list[deque[_Held]] = []
        self._ends = np.empty(0, np.int64)
        """Of each lane's first held window: nothing is to be done for the lane before that."""

    def prepare(self, order: Order, start: int, stop: int, rank: int, size: int) -> None:
        """Returns when positions `start`..`stop` can be gathered.

        They follow those of the last call, or the order or the world is another.

        Raises: Stopped.
        """
        if isinstance(order, GlobalOrder) and not order.shuffle and not self._source.at_once:
            if order is not self._order:
                self.forget()
                self._order = order
            self._prepare_pieces(start, stop)
            return
        if self._source.at_once or not isinstance(order, LaneOrder):
            if order is not self._order:
                self._source.want_all(self._stopping)
            self._order = order
            return
        owned = order.owned(rank, size)
        if order is not self._order or owned != self._owned:
            self.forget()
            self._order, self._owned = order, owned
            self._held = [deque() for _ in range(*owned)]
            self._ends = np.zeros(len(self._held), np.int64)
        first, last = start // order.settings.lanes, -(-stop // order.settings.lanes)
        due = np.flatnonzero(self._ends < last).tolist()
        for lane in due:  # everything is asked for before anything is waited for
            held = self._held[lane]
            while held and held[0].stop <= first:
                self._source.release(held.popleft().wanted)
            while not held or held[-1].stop < last:
                if not self._want_window(order, lane, held[-1].stop if held else first):
                    break
        for lane in due:
            held = self._held[lane]
            begin = 0
            for window in held:
                if begin < last and not window.there:
                    self._source.wait(window.wanted, self._stopping)
                    window.there = True
                begin = window.stop
            if held and held[-1].there:
                self._want_window(order, lane, begin)
            self._ends[lane] = held[0].stop if held else order.rows

    def _prepare_pieces(self, start: int, stop: int) -> None:
        pieces, rows = self._pieces, self._numbering.rows
        while pieces and pieces[0].stop <= start:
            self._source.release(pieces.popleft().wanted)
        end = pieces[-1].stop if pieces else start
        while end < min(stop + 2 * self._piece_rows, rows):
            begin, end = end, min(end + self._piece_rows, rows)
            pieces.append(_Held(end, self._source.want(self._numbering.ranges_in_files(begin, end))))
        for piece in pieces:
            if not piece.there:
                self._source.wait(piece.wanted, self._stopping)
                piece.there = True
            if piece.stop >= stop:
                break

    def _want_window(self, order: LaneOrder, lane: int, index: int) -> bool:
        """The window that starts at a lane's row `index`; or around it, where none is held. False: the lane ends."""
        lane += self._owned[0]
        if index >= order.lane(lane)[1]:
            return False
        _, start, stop = order.window_at(lane, index)
        wanted = self._source.want(order.window_ranges(lane, start, stop))
        self._held[lane - self._owned[0]].append(_Held(stop, wanted))
        return True

    def stop(self) -> None:
        """Ends a `prepare` that waits in another thread; nothing more can be prepared. Again: nothing."""
        with contextlib.suppress(InvalidStateError):
            self._stopping.set_result(None)

    def forget(self) -> None:
        """Let go of everything."""
        for held in self._held:
            for window in held:
                self._source.release(window.wanted)
        for piece in self._pieces:
            self._source.release(piece.wanted)
        self._held = []
        self._pieces.clear()
        self._order = None
