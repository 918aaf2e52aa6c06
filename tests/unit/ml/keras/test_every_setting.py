"""Every setting of the estimator changes what it says. One that no test here names fails the last test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic import ElasticKerasEstimator, LocalLauncher  # noqa: E402
from spark_elastic.data.dataset import Dataset  # noqa: E402
from spark_elastic.errors import CheckpointError, DataError, StoreError  # noqa: E402
from spark_elastic.ml.callbacks import EarlyStopping  # noqa: E402
from tests.unit.ml.keras.estimators import estimator, make_net, settings, weights_of  # noqa: E402
from tests.unit.ml.keras.test_sealing import Own  # noqa: E402
from tests.unit.ml.torch.estimators import make_set  # noqa: E402

TESTED_ELSEWHERE = {  # with Spark, or in test_estimator_settings
    *("feature_cols", "label_cols", "sample_weight_col", "validation", "dataset_id", "keep_dataset", "data_options"),
    *("device", "storage_options", "num_threads", "input_dtypes", "allow_nan_loss", "handle_invalid"),
}
TESTED_BELOW = {
    *("model", "metrics", "weighted_metrics", "epochs", "callbacks", "custom_objects", "verbose", "store"),
    *("checkpoint_dir", "checkpoint_interval", "checkpoint_seconds", "keep_checkpoints", "checkpoint_best_of"),
    *("checkpoint_best_mode", "run_id", "resume", "input_shapes", "label_shapes", "accumulation_steps"),
    *("num_proc", "min_num_proc", "max_num_proc", "run_options", "sync_batch_norm", "gradient_compression"),
    *("output_cols", "output_type", "prediction", "prediction_col", "probability_col", "inference_fn"),
    *("transform_batch_size", "transform_threads", "transform_device"),
}


def scaled(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"] * 3}


CHANGES_THE_WEIGHTS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "adam"},
    "loss": {"loss": "sparse_categorical_crossentropy"},
    "loss_weights": {"loss_weights": [3.0]},
    "batch_size": {"batch_size": 48},
    "per_worker_batch_size": {"batch_size": None, "per_worker_batch_size": 48},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 5},
    "transformation_fn": {"transformation_fn": scaled},
    "gradient_clip_norm": {"gradient_clip_norm": 0.01},
    "gradient_clip_value": {"gradient_clip_value": 0.001},
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
    assert weights_of(estimator(**CHANGES_THE_WEIGHTS[name]).from_dataset_path(dataset)) != weights_of(plain)


def test_it_learns_what_keras_learns(dataset: Dataset, plain: Any) -> None:
    with dataset.reader("train", batch_size=16, seed=0) as reader:
        net = make_net()
        net.compile(keras.optimizers.SGD(0.1), settings()["loss"])
        for epoch in range(2):
            for batch in reader.epoch(epoch):
                net.train_on_batch(np.array(batch.tensors["features_0"]), np.array(batch.tensors["label_0"]))
    found = weights_of(plain)
    assert np.allclose([float(n) for w in net.get_weights() for n in w.reshape(-1)], found, atol=1e-5)


def test_a_compiled_model_is_trained_as_it_was_compiled_and_is_not_changed(dataset: Dataset, plain: Any) -> None:
    net = make_net()
    net.compile(keras.optimizers.SGD(0.1), settings()["loss"], metrics=["accuracy"])
    before = net.get_weights()
    model = estimator(model=net, optimizer=None, loss=None).from_dataset_path(dataset)
    assert weights_of(model) == weights_of(plain)
    assert set(model.history.names) >= {"accuracy", "val_accuracy"}
    assert all(np.array_equal(a, b) for a, b in zip(before, net.get_weights(), strict=True))
    assert net.compiled
    assert not net.optimizer.iterations.numpy()


def test_an_optimizer_that_is_distributed_already_is_taken_for_what_is_within_it(dataset: Dataset, plain: Any) -> None:
    import spark_elastic.keras as hvd

    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert weights_of(estimator(optimizer=distributed).from_dataset_path(dataset)) == weights_of(plain)


def test_metrics_are_columns_of_the_history(dataset: Dataset) -> None:
    def ones(label: Any, output: Any) -> Any:
        return keras.ops.ones_like(label)

    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")
    model = estimator(metrics=[ones, "accuracy"], weighted_metrics=[top]).from_dataset_path(dataset)
    assert model.history["ones"] == model.history["val_ones"] == [1.0, 1.0]
    assert 0 < model.history["accuracy"][0] < model.history["accuracy"][1] <= 1
    assert len([name for name in model.history.names if name.startswith("val_")]) == 4


def test_epochs_are_the_rows_of_the_history(dataset: Dataset) -> None:
    assert len(estimator(epochs=3).from_dataset_path(dataset).history) == 3


def test_callbacks_of_both_kinds_are_called(dataset: Dataset) -> None:
    steps = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    stop = EarlyStopping("rows", patience=1)
    model = estimator(callbacks=[steps, stop], epochs=10).from_dataset_path(dataset)
    assert model.history["lr"] == pytest.approx([0.1, 0.05])


def test_custom_objects_say_what_the_names_of_the_configuration_stand_for(dataset: Dataset) -> None:
    net = keras.Sequential([keras.Input((6,)), Own(2.0), keras.layers.Dense(3)])
    model = estimator(model=net, custom_objects={"Own": Own}, epochs=1).from_dataset_path(dataset)
    assert isinstance(model.keras_model.layers[0], Own)


def test_verbose_prints_a_line_for_each_epoch(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    estimator(verbose=1).from_dataset_path(dataset)
    assert capsys.readouterr().out.count("epoch ") == 2
    estimator(verbose=0).from_dataset_path(dataset)
    assert capsys.readouterr().out == ""


def test_accumulation_and_compression_change_nothing_in_a_world_of_one(dataset: Dataset, plain: Any) -> None:
    made = estimator(accumulation_steps=4, gradient_compression="bf16")
    assert np.allclose(weights_of(made.from_dataset_path(dataset)), weights_of(plain), atol=1e-5)
    assert (made.training.compression, made.training.accumulation) == ("bf16", 4)


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None) -> Any:
        return 2 * super().call(inputs, training)


@pytest.mark.parametrize("wanted", [True, False])
def test_sync_batch_norm_leaves_ordinary_layers_in_the_fitted_model_and_names_what_it_cannot_do(
    wanted: bool, dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    layers = keras.layers
    norms = [layers.BatchNormalization(name="norm"), Scaled(name="own")]
    net = keras.Sequential([keras.Input((6,)), layers.Dense(4), *norms, layers.Dense(3)])
    made = estimator(model=net, epochs=1, sync_batch_norm=wanted)
    model = made.from_dataset_path(dataset)
    assert made.training.sync_batch_norm == wanted
    assert [type(each) for each in model.keras_model.layers] == [type(each) for each in net.layers]
    said = [record.getMessage() for record in caplog.records if "batch statistics" in record.getMessage()]
    assert len(said) == wanted
    assert all("own (Scaled)" in each for each in said)


def test_input_shapes_and_label_shapes_are_those_that_the_model_sees(dataset: Dataset) -> None:
    layers = keras.layers
    net = keras.Sequential([keras.Input((2, 3)), layers.Flatten(), layers.Dense(3)])
    shapes: list[Any] = []

    def loss(label: Any, output: Any) -> Any:
        shapes.append(tuple(label.shape[1:]))
        return keras.losses.sparse_categorical_crossentropy(label, output, from_logits=True)

    made = estimator(model=net, loss=loss, input_shapes=[(2, 3)], label_shapes=[(1,)], epochs=1)
    model = made.from_dataset_path(dataset)
    assert model._facts_of_fit().inputs[0].shape == (2, 3)
    with pytest.raises(DataError, match="features_0"):
        estimator(model=net, epochs=1).from_dataset_path(dataset)


def test_the_store_is_used_and_left_as_it_was(dataset: Dataset, tmp_path: Path) -> None:
    made = estimator(store=str(tmp_path / "place"), epochs=1)
    made.from_dataset_path(dataset)
    assert made.training.store.url.startswith(str(tmp_path / "place"))
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]
    with pytest.raises(StoreError):
        estimator(store="no-such-scheme://x", storage_options={"key": "a"}).from_dataset_path(dataset)


# --- checkpoints --------------------------------------------------------------------------------


def checkpoints(folder: Path) -> int:
    return len(list(folder.rglob("checkpoint.json")))


def test_checkpoints_are_written_as_often_and_kept_as_long_as_was_said(dataset: Dataset, tmp_path: Path) -> None:
    def left(run_id: str, **changes: Any) -> int:
        more: dict[str, Any] = {"epochs": 4, "keep_checkpoints": 9, **changes}
        estimator(checkpoint_dir=tmp_path, run_id=run_id, **more).from_dataset_path(dataset)
        return checkpoints(tmp_path / run_id)

    assert left("each") == 4
    assert left("second", checkpoint_interval=2) == 2
    assert left("kept", keep_checkpoints=2) == 2
    assert left("within", epochs=1, checkpoint_seconds=1e-6, keep_checkpoints=99) > 1
    assert left("least", keep_checkpoints=1, checkpoint_best_of="steps", checkpoint_best_mode="min") == 2
    assert left("most", keep_checkpoints=1, checkpoint_best_of="steps", checkpoint_best_mode="max") == 1


def test_a_fit_with_the_same_run_id_goes_on_and_resume_false_starts_anew(dataset: Dataset, tmp_path: Path) -> None:
    def made(**changes: Any) -> Any:
        return estimator(optimizer=keras.optimizers.Adam(0.05), **changes)

    whole = made(epochs=4).from_dataset_path(dataset)
    made(epochs=2, checkpoint_dir=tmp_path, run_id="a").from_dataset_path(dataset)
    went_on = made(epochs=4, checkpoint_dir=tmp_path, run_id="a")
    model = went_on.from_dataset_path(dataset)
    assert went_on.training.resume_from is not None
    assert weights_of(model) == weights_of(whole)
    assert model.history["loss"] == whole.history["loss"]
    anew = made(epochs=4, checkpoint_dir=tmp_path, run_id="a", resume=False)
    anew.from_dataset_path(dataset)
    assert anew.training.resume_from is None
    with pytest.raises(CheckpointError, match=r"checkpoints of another training: .*optimizer was"):
        estimator(epochs=5, checkpoint_dir=tmp_path, run_id="a").from_dataset_path(dataset)
    with pytest.raises(CheckpointError, match=r"checkpoints of another training: .*model was"):
        made(epochs=5, checkpoint_dir=tmp_path, run_id="a", model=make_net(9)).from_dataset_path(dataset)


# --- workers ------------------------------------------------------------------------------------


def test_numbers_of_workers_and_run_options_go_to_run_and_workers_are_told_the_backend(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def record(*args: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        raise RuntimeError("recorded")

    monkeypatch.setattr("spark_elastic.jobs.run.run_async", record)
    launcher = LocalLauncher()
    options = {"launcher": launcher, "elastic_timeout": 7, "env": {"MINE": "1"}}
    numbers = {"num_proc": 3, "min_num_proc": 2, "max_num_proc": 4}
    made = ElasticKerasEstimator(**settings(**numbers, run_options=options, verbose=2))
    with pytest.raises(RuntimeError, match="recorded"):
        made.from_dataset_path(dataset)
    env = {"KERAS_BACKEND": "tensorflow", "MINE": "1"}
    assert given == {**numbers, "launcher": launcher, "elastic_timeout": 7, "env": env, "verbose": 2}


# --- what transform adds ------------------------------------------------------------------------

SCHEMA = StructType([StructField("features_0", ArrayType(FloatType()))])


def test_output_columns_have_the_names_and_types_that_were_chosen(plain: Any) -> None:
    def added(**changes: Any) -> dict[str, Any]:
        made = plain.copy({plain.getParam(name): value for name, value in changes.items()})
        return {field.name: field.dataType for field in made.transformSchema(SCHEMA).fields[1:]}

    assert added() == {"output": ArrayType(FloatType()), "prediction": DoubleType()}
    assert list(added(output_cols=["logits"], prediction_col="class")) == ["logits", "class"]
    assert added(output_type="vector", prediction_col="") == {"output": VectorUDT()}
    assert added(output_cols=[], probability_col="p", prediction_col="") == {"p": VectorUDT()}
    assert [column.rule for column in plain._added()] == ["", "argmax"]
    chosen = plain.copy({plain.prediction: "argmax_probability"})
    assert [column.rule for column in chosen._added()] == ["", "argmax_probability"]


def test_settings_of_transform_go_with_the_model(dataset: Dataset) -> None:
    made = estimator(inference_fn=scaled, transform_batch_size=7, transform_threads=2, transform_device="cpu", epochs=1)
    model = made.from_dataset_path(dataset)
    predictor = model._saved_predictor()
    assert (predictor.threads, predictor.device) == (2, "cpu")
    assert (model.getInferenceFn(), model.getTransformBatchSize()) == (scaled, 7)


def test_every_setting_is_tested() -> None:
    tested = TESTED_ELSEWHERE | TESTED_BELOW | set(CHANGES_THE_WEIGHTS)
    assert {param.name for param in ElasticKerasEstimator().params} == tested
