"""One thread that works ahead of whoever takes its results."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


class Buffers:
    """Arrays that are used again once nobody refers to them, nor to a view of them.

    A view's `base` is the array that owns the memory, and tensors made from views keep them: so the count of
    references to the owner tells whether anybody can still see it. Safe for threads.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._guard = threading.Lock()
        self._held: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        self._unseen = self._references(0)  # what Python counts differs between its versions

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8, at least `nbytes`; its contents are whatever they were."""
        with self._guard:  # what is returned has been referred to before another thread looks
            for index in range(len(self._held)):
                if self._held[index].nbytes >= nbytes and self._references(index) == self._unseen:
                    return self._held[index]
            made = np.empty(nbytes, np.uint8)
            large = [buffer for buffer in self._held if buffer.nbytes >= nbytes]
            self._held = [made, *large[: self._keep - 1]]
            return made

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._held[index])


class Prefetcher(Iterator[T], Generic[T]):
    """Items of `source`, made ahead of time by a thread, at most `depth` of them.

    What `source` raises is raised to the consumer, in its turn. Whoever stops early calls `close`, which waits for
    the item under way.

    on_close: tells the source to hurry.
    """

    def __init__(
        self,
        source: Callable[[], Iterable[T]],
        depth: int,
        name: str,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_close = on_close
        self._depth = depth
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(source,), name=name, daemon=True)
        self._thread.start()

    def _run(self, source: Callable[[], Iterable[T]]) -> None:
        items: Iterator[T] = iter(())
        try:
            items = iter(source())
            while self._room():
                try:
                    item = next(items)
                except StopIteration:
                    break
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                del item
        except BaseException as error:  # crosses to the consumer's thread
            self._error = error
        finally:
            if isinstance(items, Generator):
                items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _room(self) -> bool:
        """Waits before an item is made, not after: what is made and not wanted yet would only take memory. False: close
        was called."""
        with self._changed:
            while len(self._items) >= self._depth and not self._closed:
                self._changed.wait()
            return not self._closed

    def __next__(self) -> T:
        with self._changed:
            while not self._items and not self._ended:
                self._changed.wait()
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread. Again: nothing."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        self._on_close()
        if self._thread is not threading.current_thread():
            self._thread.join()
