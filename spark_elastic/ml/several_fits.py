"""Several fits on one DataFrame, as a CrossValidator asks for them: the rows are written once for all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.ml.written_sets import give_back, remove_unless_used


class SharedSets:
    """Sets that several fits on one DataFrame have in common. removed: whether to, when the last of `fits` is done."""

    def __init__(self, fits: int, removed: bool) -> None:
        self._left = fits
        self._removed = removed
        self._lock = threading.Lock()
        self._sets: dict[str, Dataset] = {}

    def get(self, key: str, write: Callable[[], Dataset]) -> Dataset:
        with self._lock:
            if key not in self._sets or not self._sets[key].store.exists(MANIFEST_NAME):
                self._sets[key] = write()
            return self._sets[key]

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                for dataset in self._sets.values():
                    if self._removed:
                        remove_unless_used(dataset)
                    give_back(dataset)


class Fits:
    """(index, model) for each param map; safe to be drawn from by several threads, as CrossValidator does."""

    def __init__(self, fit: Callable[[int], Any], count: int) -> None:
        self._fit = fit
        self._indices = iter(range(count))
        self._lock = threading.Lock()

    def __iter__(self) -> Fits:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._lock:
            index = next(self._indices)
        return index, self._fit(index)
