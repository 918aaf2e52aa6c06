"""What an estimator has to know of a materialised set: its inputs, and whether it may be removed."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.data import catalog
from spark_elastic.data.catalog import is_leased
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.layout import TensorField
from spark_elastic.data.manifest import FOUND_AGAIN, MANIFEST_NAME
from spark_elastic.errors import DatasetError
from spark_elastic.ml.preparation import numbered

log = logging.getLogger("spark_elastic.ml")


def padding_of(dataset: Dataset) -> dict[str, int]:
    """By tensor: the length that ragged arrays were padded to when the set was written."""
    padded: dict[str, int] = dataset.manifest.about.get("settings", {}).get("pad_to", {})
    return padded


def nan_of(dataset: Dataset) -> bool | list[str]:
    """The tensors that NaN was allowed in when the set was written, or whether it was in all."""
    allowed: bool | list[str] = dataset.manifest.about.get("settings", {}).get("allow_nan", False)
    return allowed


def check_tensors(dataset: Dataset) -> None:
    """Raises: DatasetError: the set was not written for an estimator."""
    names = [each.name for each in dataset.layout.fields]
    if "features_0" not in names or "train" not in dataset.splits:
        raise DatasetError(
            f"{dataset.store.url} has the tensors {names} and the splits {list(dataset.splits)}; an estimator needs "
            "features_0 (and features_1, ..., label_0, ...) in train: materialize(df, {'features_0': [...], "
            "'label_0': ...})"
        )


def is_found_again(dataset: Any, written: Dataset) -> bool:
    """Whether a later fit can find the rows of this DataFrame where they were written: not if the query is random, or
    passes for it, as everything behind a VectorAssembler does, unless it is cached."""
    if not written.manifest.about.get(FOUND_AGAIN, True):
        return False
    names = {"`" + name.replace("`", "``") + "`" for each in written.layout.fields for name in each.columns}
    return bool(dataset.select(*names)._jdf.queryExecution().withCachedData().deterministic())


def give_back(dataset: Dataset) -> None:
    """A fit needs the set no longer: what fits have left may go if it is too much, or too old.

    Raises nothing: a storage that does not answer is no reason to lose what was trained.
    """
    try:
        catalog.give_back(dataset.store, catalog.Limits.of_environment(os.environ), clock.wall())
    except Exception as error:  # each filesystem has errors of its own
        log.warning("the rows in %s could not be given back: %s", dataset.store.url, error)


def remove_unless_used(dataset: Dataset) -> None:
    """Unless somebody uses the set, or has asked to keep it. Raises nothing, as `give_back`."""
    try:
        if not dataset.store.exists("keep") and not is_leased(dataset.store, clock.wall()):
            dataset.delete()
    except Exception as error:  # each filesystem has errors of its own
        log.warning("the dataset in %s could not be deleted: %s", dataset.store.url, error)


def model_inputs(dataset: Dataset, shapes: Sequence[Sequence[int] | None] | None) -> tuple[TensorField, ...]:
    """features_0, features_1, ... in the order in which the model takes them, however the set has them.

    shapes: of one row, where they differ from those that are stored; as `input_shapes`.
    """
    stored = numbered("features_", {each.name: each for each in dataset.layout.fields})
    given = itertools.chain(shapes or (), itertools.repeat(None))
    return tuple(
        each if shape is None else replace(each, shape=tuple(shape)) for each, shape in zip(stored, given, strict=False)
    )


# Several fits on one DataFrame, as a CrossValidator asks for them: the rows are written once for all.


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
