"""The dataset of an estimator's fit: check one that was written before, and share it between fits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from spark_elastic.data.catalog import delete_unless_used
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME, TensorField
from spark_elastic.errors import DatasetError, InvalidSettingsError
from spark_elastic.ml.preparation import INPUT, LABEL, WEIGHT, numbered
from spark_elastic.ml.shared_params import WRITE_OPTIONS

if TYPE_CHECKING:
    from spark_elastic.ml.params import ElasticParams


def model_inputs(dataset: Dataset, shapes: Sequence[Sequence[int] | None] | None) -> tuple[TensorField, ...]:
    """Return the fields of features_0, features_1, ...; a shape in the setting `input_shapes` replaces the stored."""
    stored = numbered(INPUT, {each.name: each for each in dataset.layout.fields})
    given = itertools.chain(shapes or (), itertools.repeat(None))
    return tuple(
        each if shape is None else replace(each, shape=tuple(shape)) for each, shape in zip(stored, given, strict=False)
    )


# --- checks of a dataset that was written before ----------------------------------------------


def check_tensors(dataset: Dataset) -> None:
    """Raise `DatasetError` if the dataset was not written for an estimator."""
    names = [each.name for each in dataset.layout.fields]
    if "features_0" not in names or "train" not in dataset.splits:
        raise DatasetError(
            f"{dataset.store.url} has the tensors {names} and the splits {list(dataset.splits)}; an estimator needs "
            "features_0 (and features_1, ..., label_0, ...) in train: materialize(df, {'features_0': [...], "
            "'label_0': ...})"
        )


def check_stored_settings(dataset: Dataset, estimator: ElasticParams) -> None:
    """Raise if a setting is about writing rows, or if settings about columns differ from those of the dataset."""
    given, where = estimator.getOrDefault, dataset.store.url
    options = given("data_options") or {}
    of_writing = [name for name in ("dataset_id", "keep_dataset") if estimator.isSet(name) and given(name)]
    of_writing += [f"data_options[{name!r}]" for name in WRITE_OPTIONS if name in options]
    if of_writing:
        raise InvalidSettingsError(
            f"{', '.join(of_writing)}: from_dataset_path writes no rows, so leave this out, or use it where they "
            "are written"
        )
    columns = {each.name: list(each.columns) for each in dataset.layout.fields}
    for setting, prefix in (("feature_cols", INPUT), ("label_cols", LABEL), ("sample_weight_col", WEIGHT)):
        value = given(setting)
        stored = [name for tensor, names in columns.items() if tensor.startswith(prefix) for name in names]
        if value is not None and flat_names([value] if isinstance(value, str) else value) != stored:
            raise DatasetError(
                f"{setting}={value!r}, but the dataset in {where} was made of {stored}; set it to what was stored, or "
                "to None"
            )
    dtypes = given("input_dtypes")
    for number, (dtype, field) in enumerate(zip(dtypes or (), model_inputs(dataset, None), strict=False)):
        if dtype is not None and np.dtype(dtype) != np.dtype(field.dtype):
            raise DatasetError(
                f"input_dtypes={dtypes!r}, but features_{number} of the dataset in {where} is "
                f"{np.dtype(field.dtype).name}; set it to what was stored, or to None"
            )
    if given("validation") is not None and "validation" not in dataset.splits:
        raise DatasetError(
            f"validation={given('validation')!r}, but the dataset in {where} was written without validation= and has "
            "no such rows; leave it out, or write the dataset again"
        )


def flat_names(names: Sequence[Any]) -> list[str]:
    """Return the column names in a list of names or of lists of names."""
    return [each for name in names for each in (name if isinstance(name, list) else [name])]


# --- several fits on one DataFrame, as a CrossValidator does ------------------------------------


class SharedDatasets:
    """Datasets that several fits on one DataFrame share. The last fit deletes those that are not to be kept."""

    def __init__(self, fits: int) -> None:
        self._fits_left = fits
        self._lock = threading.Lock()
        self._datasets: dict[str, Dataset] = {}

    def get(self, key: str, write: Callable[[], Dataset]) -> Dataset:
        with self._lock:
            if key not in self._datasets or not self._datasets[key].store.exists(MANIFEST_NAME):
                self._datasets[key] = write()
            return self._datasets[key]

    def done(self) -> None:
        """End one of the fits."""
        with self._lock:
            self._fits_left -= 1
            if self._fits_left == 0:
                for dataset in self._datasets.values():
                    delete_unless_used(dataset.store)
