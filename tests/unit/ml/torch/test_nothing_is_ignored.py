"""Settings without an effect are errors, and credentials are not saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic import ElasticTorchEstimator
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError, InvalidSettingsError
from spark_elastic.ml.persistence import plain_and_objects
from tests.unit.ml.torch.estimators import estimator, make_set


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("set"))


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr_scheduler": plateau, "scheduler_interval": "step"}, "'step' with ReduceLROnPlateau"),
        ({"lr_scheduler": steps, "scheduler_monitor": "loss"}, "'loss' with StepLR, which follows no value"),
    ],
)
def test_a_scheduler_that_does_not_go_with_its_settings_is_refused(
    settings: dict[str, Any], said: str, dataset: Dataset
) -> None:
    with pytest.raises(InvalidSettingsError, match=said):
        estimator(**settings).from_dataset_path(dataset)


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


def test_only_a_spark_dataframe_can_be_fitted() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InvalidSettingsError, match=r"needs a Spark DataFrame, not pandas\..*DataFrame"):
        estimator(feature_cols=["a"], label_cols=["b"]).fit(pandas.DataFrame({"a": [1.0], "b": [0]}))


def test_credentials_are_not_written_with_an_estimator() -> None:
    made = ElasticTorchEstimator(storage_options={"key": os.urandom(4).hex()}, epochs=3)
    plain, objects, _ = plain_and_objects(made)
    assert (plain, objects) == ({"epochs": 3}, {})


def test_a_store_is_written_with_an_estimator_by_its_name_and_needs_no_trust(tmp_path: Path) -> None:
    for store in (str(tmp_path), tmp_path, Store.create(tmp_path)):
        plain, objects, _ = plain_and_objects(ElasticTorchEstimator(store=store))
        assert (plain, objects) == ({"store": str(tmp_path)}, {})
