"""The rows of an estimator's fit: write them, check those that were written before, and share them between fits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from spark_elastic.data.catalog import delete_unless_used
from spark_elastic.data.columns import Query, Request
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, DatasetError, InvalidSettingsError
from spark_elastic.ml.params import ElasticParams
from spark_elastic.ml.preparation import INPUT, LABEL, WEIGHT, Tensors, flat_names, model_inputs
from spark_elastic.ml.shared_params import WRITE_OPTIONS
from spark_elastic.spark.cluster import Cluster

_ESTIMATOR_NAMES = {
    "dtypes": "dtypes= is input_dtypes=[...], with one for each input; labels and weights have to be cast as columns",
    "shapes": "shapes= is input_shapes=[...] and label_shapes=[...]",
    "pad_to": "pad_to= and variable= go into data_options={{...}}",
}
_DATA_OPTION = "{}= goes into data_options={{...}}"
"""Advice for arguments of `materialize` that a `DataError` names in its `settings`: their names in an estimator."""


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
        with self._lock:
            self._fits_left -= 1
            if self._fits_left == 0:
                for dataset in self._datasets.values():
                    delete_unless_used(dataset.store)


def request_of(tensors: Tensors, given: Callable[[str], Any]) -> Request:
    """Return the arguments of `materialize` for an estimator's tensors and settings."""
    options = {name: value for name, value in (given("data_options") or {}).items() if name in WRITE_OPTIONS}
    fixed = {name: given(name) for name in ("validation", "seed", "missing")}
    fixed["filled"] = [name for name in tensors.columns if name.startswith(INPUT)]
    return Request(tensors.columns, tensors.dtypes, tensors.shapes, **fixed, **options)


def written_rows(
    cluster: Cluster, query: Query, store: Store, given: Callable[[str], Any], shared: SharedDatasets | None
) -> Dataset:
    """Write the rows of a DataFrame, or find them; raise as `materialize`. `given` returns the value of a setting."""
    from spark_elastic.data import materialization

    # the folds of a CrossValidator are other rows each, so no name may find one in place of another
    name = given("dataset_id") if shared is None else None
    kept = bool(given("keep_dataset")) or name is not None

    def write() -> Dataset:
        try:
            return materialization.write_dataset(cluster, query, store, name, kept, given("verbose"))
        except DataError as error:
            advice = [_ESTIMATOR_NAMES.get(each, _DATA_OPTION).format(each) for each in getattr(error, "settings", ())]
            if advice:
                error.message += f"\n(of an estimator: {'; '.join(advice)})"
            raise

    return write() if shared is None else shared.get(json.dumps(query.request.to_json(), sort_keys=True), write)


def check_stored(dataset: Dataset, settings: ElasticParams) -> None:
    """Raise `DatasetError` or `InvalidSettingsError` if settings do not go with a dataset that was written before."""
    names = [each.name for each in dataset.layout.fields]
    if "features_0" not in names or "train" not in dataset.splits:
        raise DatasetError(
            f"{dataset.store.url} has the tensors {names} and the splits {list(dataset.splits)}; an estimator needs "
            "features_0 (and features_1, ..., label_0, ...) in train: materialize(df, {'features_0': [...], "
            "'label_0': ...})"
        )
    given, where = settings.getOrDefault, dataset.store.url
    options = given("data_options") or {}
    of_writing = [name for name in ("dataset_id", "keep_dataset") if settings.isSet(name) and given(name)]
    of_writing += ["missing"] if given("missing") != "error" else []
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
