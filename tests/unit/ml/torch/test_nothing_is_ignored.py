"""Settings without an effect are errors, and credentials are not saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_elastic import ElasticTorchEstimator
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError, InvalidSettingsError
from spark_elastic.ml.persistence import plain_and_objects
from tests.unit.ml.torch.estimators import estimator, make_set


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("set"))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"dataset_id": "x"}, InvalidSettingsError, "dataset_id: from_dataset_path writes no rows"),
        ({"keep_dataset": True}, InvalidSettingsError, "keep_dataset: from_dataset_path"),
        ({"data_options": {"allow_nan": True}}, InvalidSettingsError, "'allow_nan'"),
        (
            {"feature_cols": ["a", "b"]},
            DatasetError,
            r"feature_cols=\['a', 'b'\], but the dataset .* of \['features_0'\]",
        ),
        ({"label_cols": ["y", "z"]}, DatasetError, r"label_cols=\['y', 'z'\], but"),
        ({"sample_weight_col": "w"}, DatasetError, r"sample_weight_col='w', but the dataset .* was made of \[\]"),
    ],
)
def test_settings_that_contradict_an_existing_dataset_are_refused(
    settings: dict[str, Any], error: type[Exception], said: str, dataset: Dataset
) -> None:
    with pytest.raises(error, match=said):
        estimator(**settings).from_dataset_path(dataset)


def test_dataset_without_validation_rows_is_refused_if_validation_is_set(tmp_path: Path) -> None:
    from spark_elastic.data.dataset import pack

    rows = {"features_0": np.zeros((8, 6), np.float32), "label_0": np.zeros(8, np.int64)}
    with pytest.raises(DatasetError, match=r"validation=0\.1, but the dataset in .* was written without validation="):
        estimator(validation=0.1).from_dataset_path(pack(rows, tmp_path))


def test_credentials_are_not_written_with_an_estimator() -> None:
    made = ElasticTorchEstimator(storage_options={"key": os.urandom(4).hex()}, epochs=3)
    plain, objects, _ = plain_and_objects(made)
    assert (plain, objects) == ({"epochs": 3}, {})


def test_a_store_is_written_with_an_estimator_by_its_name_and_needs_no_trust(tmp_path: Path) -> None:
    for store in (str(tmp_path), tmp_path, Store.create(tmp_path)):
        plain, objects, _ = plain_and_objects(ElasticTorchEstimator(store=store))
        assert (plain, objects) == ({"store": str(tmp_path)}, {})
