"""Settings of the PyTorch estimator alone, and what each of them changes; see `both/test_estimators.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, DatasetError, InvalidSettingsError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.persistence import plain_and_objects
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_net, make_set, settings


@pytest.fixture(scope="module")
def plain(dataset: Dataset) -> Any:
    return estimator().from_dataset_path(dataset)


def test_model_is_what_is_trained_and_is_not_changed(dataset: Dataset) -> None:
    net = make_net(width=5)
    before = [value.clone() for value in net.state_dict().values()]
    model = estimator(model=net).from_dataset_path(dataset)
    assert model.module[0].out_features == 5
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert not torch.equal(model.module[0].weight, net[0].weight)


def test_scheduler_monitor_is_the_column_that_is_followed(dataset: Dataset) -> None:
    def never_better(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    settings: dict[str, Any] = {"lr_scheduler": never_better, "epochs": 3}
    assert estimator(**settings).from_dataset_path(dataset).history["lr"] == [0.1, 0.1, 0.1]  # the loss gets better
    model = estimator(**settings, scheduler_monitor="rows").from_dataset_path(dataset)  # always the same
    assert model.history["lr"] == pytest.approx([0.1, 0.1, 0.01])


class Threads(Callback):
    """Writes the number of threads of the worker to a file, because the worker has a copy of the callback."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_batch_end(self, run: Any) -> None:
        Path(self.path).write_text(str(torch.get_num_threads()))


def test_num_threads_are_those_of_the_worker(dataset: Dataset, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            estimator(num_threads=count, callbacks=[Threads(tmp_path / "t")]).from_dataset_path(dataset)
            assert (tmp_path / "t").read_text() == str(count)
    finally:
        torch.set_num_threads(before)


def with_norm(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))


def test_sync_batch_norm_is_on_and_the_fitted_model_has_ordinary_layers(dataset: Dataset) -> None:
    net = with_norm(nn.BatchNorm1d(8))
    made = estimator(model=net)
    model = made.from_dataset_path(dataset)
    assert made.training.sync_batch_norm
    assert (
        [type(each) for each in model.module] == [type(each) for each in net] == [nn.Linear, nn.BatchNorm1d, nn.Linear]
    )
    assert int(model.module[1].num_batches_tracked) == 12


class Scaled(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_layer_that_cannot_be_synchronised_is_named(
    wanted: bool, dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    estimator(model=with_norm(Scaled(8)), sync_batch_norm=wanted).from_dataset_path(dataset)
    said = [record.getMessage() for record in caplog.records if "batch statistics" in record.getMessage()]
    assert len(said) == wanted
    assert all("1 (Scaled)" in each for each in said)


def test_a_run_id_of_a_training_on_other_rows_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    estimator(checkpoint_dir=tmp_path / "runs", run_id="a").from_dataset_path(dataset)
    other = make_set(tmp_path / "other", extra=lambda count: torch.zeros(count, 2).numpy())
    with pytest.raises(CheckpointError, match="checkpoints of another training: tensors was"):
        estimator(checkpoint_dir=tmp_path / "runs", run_id="a").from_dataset_path(other)
    with pytest.raises(CheckpointError, match="seed was 0 and is 1"):
        estimator(checkpoint_dir=tmp_path / "runs", run_id="a", seed=1).from_dataset_path(dataset)
    deep = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    estimator(checkpoint_dir=tmp_path / "runs", run_id="b", model=deep).from_dataset_path(dataset)
    wide = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    with pytest.raises(CheckpointError, match=r"model was \.\.\..*bias=True.* and is \.\.\..*bias=False"):
        estimator(checkpoint_dir=tmp_path / "runs", run_id="b", model=wide).from_dataset_path(dataset)


# --- inputs: ordered by number, in one shape ----------------------------------------------------------


class Two(nn.Module):
    """Inputs [n, 6] and [n, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        # `view` across rows, as in models that were written for the tensors of a DataLoader: they are contiguous
        return self.wide(wide.view(-1).view(-1, 6)) - self.narrow(narrow.view(-1).view(-1, 2))


class Image(nn.Module):
    """Input [n, 1, height, 3]."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, (height, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.conv(image).flatten(1)


def rows(**more: Any) -> dict[str, Any]:
    """Columns by names in another order than their numbers."""
    generator = np.random.default_rng(1)
    features = {"features_1": (24, 2), "features_x": (24, 1), "features_0": (24, 6)}
    made = {name: generator.normal(size=shape).astype(np.float32) for name, shape in features.items()}
    return {**{name: value for name, value in made.items() if name in more.get("only", made)}, "label_0": [0, 1, 2] * 8}


def fitted(dataset: Dataset, model: nn.Module, **changes: Any) -> Any:
    chosen = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "epochs": 1, **changes}
    return HereEstimator(**settings(**chosen)).from_dataset_path(dataset)


def test_inputs_are_ordered_by_number_not_by_their_order_in_the_dataset(tmp_path: Path) -> None:
    model = fitted(pack(rows(), tmp_path), Two())
    inputs = model._facts_of_fit().inputs
    assert [field.name for field in inputs] == ["features_0", "features_1"]
    assert [column.shape.shape for column in model._added() if column.made == "raw"] == [(3,)]


def test_input_shapes_are_those_of_transform_too(tmp_path: Path) -> None:
    dataset = pack(rows(only=["features_0"]), tmp_path)
    changes = {"transformation_fn": cropped, "inference_fn": cropped}
    assert len(fitted(dataset, Image(1), input_shapes=[(1, 2, 3)], **changes)._added()) == 4
    model = fitted(dataset, Image(2), input_shapes=[(1, 2, 3)])
    assert model._facts_of_fit().inputs[0].shape == (1, 2, 3)
    assert [column.shape.shape for column in model._added() if column.made == "raw"] == [(3,)]


def cropped(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"][:, :, :1]}


# --- settings without an effect, credentials ----------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"dataset_id": "x"}, InvalidSettingsError, "dataset_id: from_dataset_path writes no rows"),
        ({"keep_dataset": True}, InvalidSettingsError, "keep_dataset: from_dataset_path"),
        ({"data_options": {"allow_nan": True}}, InvalidSettingsError, "'allow_nan'"),
        ({"feature_cols": ["a", "b"]}, DatasetError, r"feature_cols=\['a', 'b'\], but .* of \['features_0'\]"),
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
