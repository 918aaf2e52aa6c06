"""Every setting of the estimator changes what it says. One that no test here names fails the last test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType
from torch import nn

from spark_elastic import ElasticTorchEstimator, LocalLauncher
from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import CheckpointError, InvalidSettingsError, StoreError
from spark_elastic.ml.callbacks import Callback, EarlyStopping
from tests.unit.ml.torch.estimators import estimator, make_net, make_set, weights_of

TESTED_WITH_SPARK = {
    *("feature_cols", "label_cols", "sample_weight_col", "validation", "dataset_id", "keep_dataset"),
    *("input_dtypes", "handle_invalid"),
}
TESTED_BELOW = {
    *("model", "metrics", "epochs", "callbacks", "device", "num_threads", "verbose", "store", "storage_options"),
    *("checkpoint_dir", "checkpoint_interval", "checkpoint_seconds", "keep_checkpoints", "checkpoint_best_of"),
    *("checkpoint_best_mode", "run_id", "resume", "input_shapes", "label_shapes", "data_options"),
    *("num_proc", "min_num_proc", "max_num_proc", "run_options", "gradient_compression", "accumulation_steps"),
    "sync_batch_norm",
    *("output_cols", "output_type", "prediction", "prediction_col", "probability_col", "inference_fn"),
    *("transform_batch_size", "transform_threads", "transform_device", "scheduler_monitor", "allow_nan_loss"),
}


def scaled(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"] * 3}


def doubled(model: nn.Module, batch: Any) -> torch.Tensor:
    return 2 * nn.functional.cross_entropy(model(*batch.inputs), batch.labels[0])


def slower(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


CHANGES_THE_WEIGHTS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": torch.optim.Adam},
    "loss": {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)},
    "loss_weights": {"loss": [nn.CrossEntropyLoss()], "loss_weights": [3.0]},
    "batch_size": {"batch_size": 48},
    "per_worker_batch_size": {"batch_size": None, "per_worker_batch_size": 48},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 5},
    "transformation_fn": {"transformation_fn": scaled},
    "gradient_clip_norm": {"gradient_clip_norm": 0.01},
    "gradient_clip_value": {"gradient_clip_value": 0.001},
    "lr_scheduler": {"lr_scheduler": slower},
    "scheduler_interval": {"lr_scheduler": slower, "scheduler_interval": "step"},
    "train_fn": {"loss": None, "train_fn": doubled},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def plain(dataset: Dataset) -> Any:
    return estimator().from_dataset_path(dataset)


def test_two_fits_with_the_same_settings_give_the_same_weights(dataset: Dataset, plain: Any) -> None:
    again = estimator().from_dataset_path(dataset)
    assert weights_of(again) == weights_of(plain)
    assert again.history["loss"] == plain.history["loss"]


@pytest.mark.parametrize("name", CHANGES_THE_WEIGHTS)
def test_the_trained_weights_depend_on(name: str, dataset: Dataset, plain: Any) -> None:
    changes = dict(CHANGES_THE_WEIGHTS[name])
    reference = plain
    if name == "scheduler_interval":
        reference = estimator(lr_scheduler=slower).from_dataset_path(dataset)
    assert weights_of(estimator(**changes).from_dataset_path(dataset)) != weights_of(reference)


def test_model_is_what_is_trained_and_is_not_changed(dataset: Dataset) -> None:
    net = make_net(width=5)
    before = [value.clone() for value in net.state_dict().values()]
    model = estimator(model=net).from_dataset_path(dataset)
    assert model.module[0].out_features == 5
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert not torch.equal(model.module[0].weight, net[0].weight)


def test_metrics_are_columns_of_the_history(dataset: Dataset) -> None:
    model = estimator(metrics={"ones": lambda output, label: torch.ones(len(label))}).from_dataset_path(dataset)
    assert model.history["ones"] == [1.0, 1.0]
    assert model.history["val_ones"] == [1.0, 1.0]


def test_epochs_are_the_rows_of_the_history(dataset: Dataset) -> None:
    assert len(estimator(epochs=3).from_dataset_path(dataset).history) == 3


def test_scheduler_monitor_is_the_column_that_is_followed(dataset: Dataset) -> None:
    def never_better(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    settings: dict[str, Any] = {"lr_scheduler": never_better, "epochs": 3}
    assert estimator(**settings).from_dataset_path(dataset).history["lr"] == [0.1, 0.1, 0.1]  # the loss gets better
    model = estimator(**settings, scheduler_monitor="rows").from_dataset_path(dataset)  # always the same
    assert model.history["lr"] == pytest.approx([0.1, 0.1, 0.01])


def test_callbacks_are_called_and_may_stop_the_training(dataset: Dataset) -> None:
    stop = EarlyStopping("rows", patience=1)
    model = estimator(callbacks=[stop], epochs=10).from_dataset_path(dataset)
    assert len(model.history) == 2


def test_device_is_where_workers_train(dataset: Dataset) -> None:
    made = estimator(device="cpu")
    made.from_dataset_path(dataset)
    assert made.training.device == "cpu"
    with pytest.raises(InvalidSettingsError, match="device='gpu'"):
        estimator(device="gpu").from_dataset_path(dataset)


class Threads(Callback):
    """Says how many threads the worker has in a place that outlives its copy."""

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


def test_verbose_prints_a_line_for_each_epoch(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    estimator(verbose=1).from_dataset_path(dataset)
    assert capsys.readouterr().out.count("epoch ") == 2
    estimator(verbose=0).from_dataset_path(dataset)
    assert capsys.readouterr().out == ""


def test_gradient_compression_and_accumulation_steps_reach_the_workers(dataset: Dataset) -> None:
    made = estimator(gradient_compression="bf16", accumulation_steps=4)
    made.from_dataset_path(dataset)
    assert (made.training.compression, made.training.accumulation) == ("bf16", 4)


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
    made = estimator(model=net, sync_batch_norm=False)
    made.from_dataset_path(dataset)
    assert not made.training.sync_batch_norm


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


def shapes(model: nn.Module, batch: Any) -> Any:
    loss = nn.functional.cross_entropy(model(batch.inputs[0].flatten(1)), batch.labels[0].reshape(-1))
    return loss, torch.tensor([batch.inputs[0].shape[1], batch.labels[0].dim()]).expand(batch.rows, 2)


def test_input_shapes_and_label_shapes_are_those_that_the_model_sees(dataset: Dataset) -> None:
    settings: dict[str, Any] = {"loss": None, "train_fn": shapes}
    settings["metrics"] = {
        "axis": lambda output, label: output[:, 0].double(),
        "axes": lambda output, label: output[:, 1].double(),
    }
    model = estimator(**settings, input_shapes=[(2, 3)], label_shapes=[(1,)]).from_dataset_path(dataset)
    assert (model.history["axis"], model.history["axes"]) == ([2.0, 2.0], [2.0, 2.0])
    model = estimator(**settings).from_dataset_path(dataset)
    assert (model.history["axis"], model.history["axes"]) == ([6.0, 6.0], [1.0, 1.0])


def test_data_options_reach_the_readers(dataset: Dataset) -> None:
    made = estimator(data_options={"order": "lanes", "prefetch": 1})
    made.from_dataset_path(dataset)
    assert (made.training.order, made.training.prefetch) == ("lanes", 1)


def test_the_store_is_used_and_left_as_it_was(dataset: Dataset, tmp_path: Path) -> None:
    made = estimator(store=str(tmp_path / "place"))
    made.from_dataset_path(dataset)
    assert made.training.store.url.startswith(str(tmp_path / "place"))
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]


def test_storage_options_are_given_to_the_filesystem(dataset: Dataset) -> None:
    with pytest.raises(StoreError):
        estimator(store="no-such-scheme://x", storage_options={"key": "a"}).from_dataset_path(dataset)


# --- checkpoints --------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob("checkpoint.json"))


def test_checkpoints_are_written_below_the_run_id_and_the_last_are_kept(dataset: Dataset, tmp_path: Path) -> None:
    made = estimator(checkpoint_dir=tmp_path, run_id="a", epochs=5, keep_checkpoints=2)
    made.from_dataset_path(dataset)
    assert len(checkpoints(tmp_path / "a")) == 2


def test_checkpoint_interval_is_in_epochs(dataset: Dataset, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "epochs": 4, "keep_checkpoints": 9}
    estimator(**settings, run_id="each").from_dataset_path(dataset)
    estimator(**settings, run_id="second", checkpoint_interval=2).from_dataset_path(dataset)
    assert (len(checkpoints(tmp_path / "each")), len(checkpoints(tmp_path / "second"))) == (4, 2)


def test_checkpoint_seconds_adds_some_within_an_epoch(dataset: Dataset, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "epochs": 1, "keep_checkpoints": 99, "batch_size": 1}
    estimator(**settings, run_id="a", checkpoint_seconds=1e-6).from_dataset_path(dataset)
    assert len(checkpoints(tmp_path / "a")) > 1


def test_the_best_is_kept_by_its_column_and_mode(dataset: Dataset, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_dir": tmp_path, "epochs": 4, "keep_checkpoints": 1}
    least = estimator(**settings, run_id="least", checkpoint_best_of="steps", checkpoint_best_mode="min")
    least.from_dataset_path(dataset)
    most = estimator(**settings, run_id="most", checkpoint_best_of="steps", checkpoint_best_mode="max")
    most.from_dataset_path(dataset)
    assert len(checkpoints(tmp_path / "least")) == 2, "the first epoch has the fewest steps, the last is the newest"
    assert len(checkpoints(tmp_path / "most")) == 1


def test_a_fit_with_the_same_run_id_goes_on_and_resume_false_starts_anew(dataset: Dataset, tmp_path: Path) -> None:
    whole = estimator(epochs=4).from_dataset_path(dataset)
    estimator(epochs=2, checkpoint_dir=tmp_path, run_id="a").from_dataset_path(dataset)
    went_on = estimator(epochs=4, checkpoint_dir=tmp_path, run_id="a")
    model = went_on.from_dataset_path(dataset)
    assert went_on.training.resume_from is not None
    assert weights_of(model) == weights_of(whole)
    assert model.history["loss"] == whole.history["loss"]
    anew = estimator(epochs=4, checkpoint_dir=tmp_path, run_id="a", resume=False)
    anew.from_dataset_path(dataset)
    assert anew.training.resume_from is None


def test_a_run_id_of_a_training_on_other_rows_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    estimator(checkpoint_dir=tmp_path / "runs", run_id="a").from_dataset_path(dataset)
    other = make_set(tmp_path / "other", extra=lambda count: torch.zeros(count, 2).numpy())
    with pytest.raises(CheckpointError, match="checkpoints of another training: tensors was"):
        estimator(checkpoint_dir=tmp_path / "runs", run_id="a").from_dataset_path(other)
    with pytest.raises(CheckpointError, match="seed was 0 and is 1"):
        estimator(checkpoint_dir=tmp_path / "runs", run_id="a", seed=1).from_dataset_path(dataset)


# --- workers ------------------------------------------------------------------------------------


def test_numbers_of_workers_and_run_options_go_to_run(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def record(*args: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        raise RuntimeError("recorded")

    monkeypatch.setattr("spark_elastic.jobs.run.run_async", record)
    launcher = LocalLauncher()
    made = ElasticTorchEstimator(
        model=(net := make_net()),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=nn.CrossEntropyLoss(),
        num_proc=3,
        min_num_proc=2,
        max_num_proc=4,
        run_options={"launcher": launcher, "elastic_timeout": 7},
        verbose=2,
    )
    with pytest.raises(RuntimeError, match="recorded"):
        made.from_dataset_path(dataset)
    assert given == {
        "num_proc": 3,
        "min_num_proc": 2,
        "max_num_proc": 4,
        "launcher": launcher,
        "elastic_timeout": 7,
        "verbose": 2,
    }


# --- what transform adds ------------------------------------------------------------------------

SCHEMA = StructType([StructField("features_0", ArrayType(FloatType()))])


def added(dataset: Dataset, **changes: Any) -> dict[str, Any]:
    made = estimator(epochs=1, **changes).from_dataset_path(dataset).transformSchema(SCHEMA)
    return {field.name: field.dataType for field in made.fields[1:]}


def test_output_columns_have_the_names_and_types_that_were_chosen(dataset: Dataset) -> None:
    assert added(dataset) == {"output": ArrayType(FloatType()), "prediction": DoubleType()}
    assert list(added(dataset, output_cols=["logits"], prediction_col="class")) == ["logits", "class"]
    assert added(dataset, output_type="vector", prediction_col="") == {"output": VectorUDT()}
    assert added(dataset, output_cols=[], probability_col="p", prediction_col="") == {"p": VectorUDT()}


def test_prediction_says_how_it_is_made_and_has_to_fit_the_output(dataset: Dataset) -> None:
    def rules(**changes: Any) -> list[str]:
        return [column.rule for column in estimator(**changes).from_dataset_path(dataset)._added()]

    assert rules(prediction="argmax", epochs=1) == ["", "argmax"]
    with pytest.raises(InvalidSettingsError, match=r"prediction='value' does not go with .* shape \[3\]"):
        rules(prediction="value", epochs=1)


def test_settings_of_transform_reach_the_executors(dataset: Dataset) -> None:
    model = estimator(
        inference_fn=scaled, transform_batch_size=7, transform_threads=2, transform_device="cpu", epochs=1
    ).from_dataset_path(dataset)
    predictor = model._saved_predictor()
    assert (predictor.threads, predictor.device) == (2, "cpu")
    assert (model.getInferenceFn(), model.getTransformBatchSize()) == (scaled, 7)


def test_every_setting_is_tested() -> None:
    tested = TESTED_WITH_SPARK | TESTED_BELOW | set(CHANGES_THE_WEIGHTS)
    assert {param.name for param in ElasticTorchEstimator().params} == tested
