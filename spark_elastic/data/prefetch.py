"""Work done before its result is needed: items made ahead by a thread, buffers to reuse, rows read ahead."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from spark_elastic.data.order.permutation import GlobalOrder
from spark_elastic.data.order.shares import Shares
from spark_elastic.data.order.windows import Order, WindowedShuffle

T = TypeVar("T")


class Buffers:
    """Arrays that are used again once nobody refers to them or to a view of them. Safe for threads.

    The `base` of a view is the array that owns the memory, and tensors made from views keep it alive. So the owner's
    reference count tells whether anybody can still see the memory.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._guard = threading.Lock()
        self._held: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        self._unused = sys.getrefcount(self._held[0])  # the count differs between versions of Python

    def acquire(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of at least `nbytes` bytes with arbitrary contents."""
        with self._guard:  # the caller refers to the array before another thread looks
            for index in range(len(self._held)):
                if self._held[index].nbytes >= nbytes and sys.getrefcount(self._held[index]) == self._unused:
                    return self._held[index]
            made = np.empty(nbytes, np.uint8)
            large = [buffer for buffer in self._held if buffer.nbytes >= nbytes]
            self._held = [made, *large[: self._keep - 1]]
            return made


class Prefetcher(Iterator[T], Generic[T]):
    """An iterator whose items a thread makes ahead of time.

    The thread calls `source`, and keeps at most `depth` items ready. An exception of the source is raised to the
    consumer after the items before it. A consumer that stops early must call `close`, which calls `on_close` to
    interrupt a source that waits.
    """

    def __init__(self, source: Callable[[], Iterable[T]], depth: int, on_close: Callable[[], None]) -> None:
        self.depth = depth
        self._on_close = on_close
        self._room = threading.Semaphore(depth)
        #: Each item, or the error that ended the source; StopIteration at its end.
        self._ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="spark-elastic-reader", daemon=True)
        self._thread.start()

    def _run(self, source: Callable[[], Iterable[T]]) -> None:
        over: BaseException = StopIteration()
        items: Iterator[T] = iter(())
        try:
            items = iter(source())
            # to wait before an item is made rather than after saves the memory of one item
            while self._room.acquire() and not self._closed:
                try:
                    item = next(items)
                except StopIteration:
                    break
                self._ready.put((item, None))
                del item
        except BaseException as error:  # raised again on the consumer's thread
            over = error
        finally:
            if isinstance(items, Generator):
                items.close()
            self._ready.put((None, over))

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        item, over = self._ready.get()
        if over is not None:
            self._ready.put((None, StopIteration()))
            raise over
        self._room.release()
        return cast(T, item)

    def close(self) -> None:
        """Stop the thread and wait for the item that it is making. Repeated calls do nothing."""
        self._closed = True
        self._room.release()
        self._on_close()
        if self._thread is not threading.current_thread():
            self._thread.join()


# --- rows that are read ahead -----------------------------------------------------------------------

Ranges = list[tuple[int, int]]  # ranges of row numbers, `[start, stop)` each


class Stopped(Exception):
    """The pass over the epoch was stopped while rows were waited for."""


class Source(Protocol):
    """The storage that rows are read from: files of this host, or a remote store."""

    preload_always: bool  # the dataset is small enough to be read as a whole, whatever the order

    def request(self, ranges: Ranges) -> Any:
        """Start to read these rows, and return the request for `wait` and `release`."""

    def wait(self, request: Any, stopping: Future[None]) -> None:
        """Wait until the rows of a request are local. Raise Stopped as soon as `stopping` is done.

        Raise DatasetError for a damaged file, StoreError for rows that cannot be read.
        """

    def release(self, request: Any) -> None:
        """Give up the rows of a request, which are not needed any more."""

    def preload(self, stopping: Future[None]) -> None:
        """Prepare all rows: copy them from a remote store, as `wait` does, or read local files ahead. Thread-safe."""


@dataclass(slots=True)
class _Requested:
    """A window of a stream, or a part of the files, that was requested."""

    stop: int  # the row of the stream, or the position in the files, that it ends before
    request: Any
    local: bool = False  # its rows have been waited for


class ReadAhead:
    """The read-ahead of one pass: it requests rows before they are gathered, and releases them afterwards.

    Of each stream of a windowed shuffle, the open window is local and the next one is requested. Rows in the order of
    the files are requested in parts of `part_rows` rows, a few at a time. Rows of a permutation come from everywhere:
    all are preloaded.
    """

    def __init__(self, source: Source, rows: int, part_rows: int = 1) -> None:
        self._source = source
        self._rows = rows
        self._part_rows = part_rows
        self._parts: deque[_Requested] = deque()
        self._stopping: Future[None] = Future()
        self._order: Order | None = None
        self._owned = (0, 0)
        self._streams: list[deque[_Requested]] = []
        #: Of each stream, the end of its first requested window: before that, nothing has to be done for it.
        self._ends = np.empty(0, np.int64)

    def prepare(self, order: Order, start: int, stop: int, rank: int, size: int, shares: Shares = None) -> None:
        """Wait until a rank's positions `start`..`stop` of an order can be gathered. Raise Stopped after `stop`.

        The positions follow those of the last call, unless the order or the world is another.
        """
        if isinstance(order, GlobalOrder) and not order.shuffle and not self._source.preload_always:
            if order is not self._order:
                self.release_all()
                self._order = order
            self._prepare_parts(start, stop)
        elif self._source.preload_always or not isinstance(order, WindowedShuffle):
            if order is not self._order:
                self._source.preload(self._stopping)
            self._order = order
        else:
            self._prepare_windows(order, start, stop, order.owned(rank, size, shares))

    def _prepare_windows(self, order: WindowedShuffle, start: int, stop: int, owned: tuple[int, int]) -> None:
        if order is not self._order or owned != self._owned:
            self.release_all()
            self._order, self._owned = order, owned
            self._streams = [deque() for _ in range(*owned)]
            self._ends = np.zeros(len(self._streams), np.int64)
        first, last = start // order.settings.lanes, -(-stop // order.settings.lanes)
        due = np.flatnonzero(self._ends < last).tolist()
        for stream in due:  # everything is requested before anything is waited for
            windows = self._streams[stream]
            while windows and windows[0].stop <= first:
                self._source.release(windows.popleft().request)
            while not windows or windows[-1].stop < last:
                if not self._request_window(order, stream, windows[-1].stop if windows else first):
                    break
        for stream in due:
            windows = self._streams[stream]
            begin = 0
            for window in windows:
                if begin < last and not window.local:
                    self._source.wait(window.request, self._stopping)
                    window.local = True
                begin = window.stop
            if windows and windows[-1].local:
                self._request_window(order, stream, begin)
            self._ends[stream] = windows[0].stop if windows else order.rows

    def _prepare_parts(self, start: int, stop: int) -> None:
        parts = self._parts
        while parts and parts[0].stop <= start:
            self._source.release(parts.popleft().request)
        end = parts[-1].stop if parts else start
        while end < min(stop + 2 * self._part_rows, self._rows):
            begin, end = end, min(end + self._part_rows, self._rows)
            parts.append(_Requested(end, self._source.request([(begin, end)])))
        for part in parts:
            if not part.local:
                self._source.wait(part.request, self._stopping)
                part.local = True
            if part.stop >= stop:
                break

    def _request_window(self, order: WindowedShuffle, stream: int, index: int) -> bool:
        """Request the window around row `index` of an owned stream; return False after the stream's end."""
        number = stream + self._owned[0]
        if index >= order.lengths[number]:
            return False
        _, start, stop = order.window_at(number, index)
        self._streams[stream].append(_Requested(stop, self._source.request(order.window_ranges(number, start, stop))))
        return True

    def stop(self) -> None:
        """End a `prepare` that waits in another thread, and all later ones. Repeated calls do nothing."""
        with contextlib.suppress(InvalidStateError):
            self._stopping.set_result(None)

    def release_all(self) -> None:
        """Release every request."""
        for requested in [*(window for windows in self._streams for window in windows), *self._parts]:
            self._source.release(requested.request)
        self._streams = []
        self._parts.clear()
        self._order = None
