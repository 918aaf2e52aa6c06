"""What earlier versions have left on disk is read, and comes to what it came to: see `tests/data/make_saved.py`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pickle
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidatorModel, TrainValidationSplitModel

import spark_elastic.torch as hvd
from spark_elastic import (
    ElasticKerasEstimator,
    ElasticKerasModel,
    ElasticTorchEstimator,
    ElasticTorchModel,
    FixedHosts,
    LocalLauncher,
    materialize,
)
from spark_elastic.data.catalog import DATASETS, clear_cache
from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import CheckpointError, DatasetError
from spark_elastic.ml.callbacks import BestCheckpoint, EarlyStopping, HistoryLogger, LambdaCallback
from spark_elastic.reporting.history import History
from tests.data import own_torch, saved_cases
from tests.unit.ml.torch.estimators import HereEstimator as TorchHere

SAVED = Path(__file__).parents[2] / "data" / "saved_0_1"
ABOUT: dict[str, str] = json.loads((SAVED / "about.json").read_bytes())
EXPECTED: dict[str, Any] = json.loads((SAVED / "expected.json").read_bytes())

needs_keras = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("keras", "tensorflow")),
    reason="Keras and TensorFlow are not installed",
)


def same_minor(version: str, other: str) -> bool:
    return version.split(".")[:2] == other.split(".")[:2]


def same_version(package: str) -> bool:
    try:
        return same_minor(importlib.metadata.version(package), ABOUT[package])
    except importlib.metadata.PackageNotFoundError:
        return False


of_this_python = pytest.mark.skipif(
    not same_minor(platform.python_version(), ABOUT["python"]),
    reason=f"Python {ABOUT['python']} has pickled functions by value, which no other version can run",
)
"""Of what was pickled in a notebook."""


def described_by(package: str) -> pytest.MarkDecorator:
    """Runs are told apart by what a framework says of its layers, which differs between versions of it."""
    return pytest.mark.skipif(not same_version(package), reason=f"{package} {ABOUT[package]} has described the run")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy at another place than that where it was written, to be read from."""
    return Path(shutil.copytree(SAVED, tmp_path_factory.mktemp("earlier") / "saved"))


@pytest.fixture
def own_copy(tmp_path: Path) -> Path:
    """One that a test may write to."""
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    """Those that the models were asked for, in one partition: few processes have to import a framework."""
    made = [(*row[:3], Vectors.dense(row[3]), *row[4:]) for row in EXPECTED["rows"]]
    return spark.createDataFrame(made, ["id", "a", "b", "v", "word", "kind", "size", "aside"]).coalesce(1).cache()


@pytest.fixture(scope="module")
def assembled(rows: Any) -> Any:
    return VectorAssembler(inputCols=["a", "b", "v"], outputCol="x").transform(rows)


def assert_close(found: Any, expected: Any) -> None:
    """Numbers, in lists and dicts of any depth; text and integers are the same."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert_close(found[name], each)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, each in zip(found, expected, strict=True):
            assert_close(one, each)
    else:
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-5) if isinstance(expected, float) else expected)


def assert_gives_what_it_gave(name: str, stage: Any, rows: Any) -> None:
    expected = EXPECTED[name]
    assert_close(saved_cases.added_columns(stage.transform(rows), list(expected)), expected)


# --- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "trusted"),
    [
        ("models/torch", False),
        ("models/torch_own", True),
        pytest.param("models/keras", False, marks=needs_keras),
        pytest.param("models/keras_own", True, marks=needs_keras),
        pytest.param("models/keras_synchronised", True, marks=needs_keras),
    ],
)
def test_a_model_gives_what_it_gave_and_knows_what_it_knew(
    name: str, trusted: bool, saved: Path, assembled: Any
) -> None:
    kind = ElasticTorchModel if "torch" in name else ElasticKerasModel
    model: Any = kind.load(str(saved / name), trusted=trusted)
    assert model.uid == EXPECTED[f"{name} uid"]
    assert saved_cases.plain_settings(model) == EXPECTED[f"{name} settings"]
    assert model.history.to_json() == EXPECTED[f"{name} history"]
    assert model.events == EXPECTED[f"{name} events"]
    assert_gives_what_it_gave(name, model, assembled)


def test_the_layers_of_a_model_are_those_of_the_package(saved: Path) -> None:
    module: Any = ElasticTorchModel.load(str(saved / "models/torch_own"), trusted=True).module
    assert isinstance(module, own_torch.TwoInputs)
    assert type(module.norm) is hvd.SyncBatchNorm
    assert isinstance(module.converted, hvd.SyncBatchNorm)
    assert isinstance(module.converted, torch.nn.BatchNorm1d)
    assert isinstance(module.own, hvd.SyncBatchNorm)
    assert isinstance(module.own, own_torch.OwnNorm)


@needs_keras
def test_a_layer_of_the_package_is_found_by_its_registered_name(saved: Path, assembled: Any) -> None:
    import spark_elastic.keras as khvd

    name = "models/keras_synchronised"
    registered = ElasticKerasModel.load(str(saved / name))
    given = ElasticKerasModel.load(
        str(saved / name), custom_objects={"spark_elastic>SyncBatchNormalization": khvd.SyncBatchNormalization}
    )
    for model in (registered, given):
        assert type(model.keras_model.layers[0]) is khvd.SyncBatchNormalization
        assert_gives_what_it_gave(name, model, assembled)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ElasticTorchModel, "models/torch_own"),
        (ElasticTorchEstimator, "estimators/torch_own"),
        pytest.param(ElasticKerasModel, "models/keras_own", marks=needs_keras),
        pytest.param(ElasticKerasEstimator, "estimators/keras_own", marks=needs_keras),
    ],
)
def test_code_of_ones_own_still_needs_trust(kind: Any, name: str, saved: Path, spark: Any) -> None:
    with pytest.raises(CheckpointError, match="can only be loaded by running code"):
        kind.load(str(saved / name))


# --- what Spark ML saves around them ----------------------------------------------------------------


@needs_keras
def test_a_pipeline_of_models_of_both_frameworks(saved: Path, rows: Any) -> None:
    model = PipelineModel.load(str(saved / "stages/pipeline_model"))
    assert [type(stage) for stage in model.stages[2:]] == [ElasticTorchModel, ElasticKerasModel]
    assert_gives_what_it_gave("stages/pipeline_model", model, rows)


def test_a_pipeline_that_was_not_fitted(saved: Path, spark: Any) -> None:
    estimator = Pipeline.load(str(saved / "stages/pipeline")).getStages()[1]
    assert type(estimator) is ElasticTorchEstimator
    assert (estimator.getFeatureCols(), estimator.getBatchSize()) == (["x"], 20)
    (callback,) = estimator.getCallbacks()
    assert (type(callback), callback.patience) == (EarlyStopping, 7)


def test_a_cross_validator_with_its_best_model_its_estimator_and_its_param_maps(saved: Path, assembled: Any) -> None:
    name = "stages/cross_validator_model"
    model = CrossValidatorModel.load(str(saved / name))
    assert type(model.bestModel) is ElasticTorchModel
    assert_gives_what_it_gave(name, model, assembled)
    assert model.avgMetrics == EXPECTED[f"{name} metrics"]
    estimator: Any = model.getEstimator()
    assert type(estimator) is ElasticTorchEstimator
    assert [list(each.items()) for each in model.getEstimatorParamMaps()] == [
        [(estimator.epochs, 1)],
        [(estimator.epochs, 2)],
    ]


@needs_keras
def test_a_train_validation_split_with_its_best_model_and_its_estimator(saved: Path, assembled: Any) -> None:
    name = "stages/train_validation_split_model"
    model = TrainValidationSplitModel.load(str(saved / name))
    assert (type(model.bestModel), type(model.getEstimator())) == (ElasticKerasModel, ElasticKerasEstimator)
    assert_gives_what_it_gave(name, model, assembled)


# --- estimators -------------------------------------------------------------------------------------


def loaded(name: str, saved: Path, *, store: str | None = None, **trust: Any) -> Any:
    """An estimator whose plain settings are those that were made, and whose model gives what it gave.

    store: what a Store that was set is called.
    """
    kind = ElasticTorchEstimator if "torch" in name else ElasticKerasEstimator
    estimator: Any = kind.load(str(saved / name), **trust)
    assert estimator.uid == EXPECTED[f"{name} uid"]
    settings = EXPECTED[f"{name} settings"] | ({} if store is None else {"store": store})
    assert saved_cases.plain_settings(estimator) == settings
    made = set(EXPECTED[f"{name} set"]) - {"storage_options"}
    assert {param.name for param in estimator.params if estimator.isSet(param)} == made
    assert_close(saved_cases.says(name, estimator.getModel()), EXPECTED[f"{name} says"])
    return estimator


def assert_are_those_of_the_package(callbacks: Any, followed: str) -> None:
    stopping, best, logger = callbacks
    assert [type(each) for each in callbacks] == [EarlyStopping, BestCheckpoint, HistoryLogger]
    assert (stopping.patience, stopping.monitor.name, stopping.monitor.min_delta) == (4, "val_loss", 0.01)
    assert (best.monitor.name, best.monitor.mode, best.restores_best) == (followed, "min", False)
    assert logger.path == "/data/history.csv"


def test_an_estimator_of_torchs_own_parts(saved: Path, spark: Any) -> None:
    estimator = loaded("estimators/torch", saved)
    optimizer, model, (kinds, sizes) = estimator.getOptimizer(), estimator.getModel(), estimator.getLoss()
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.1, 0.9), (0.5, 0.9)]
    assert optimizer.param_groups[1]["params"][0] is model[3].weight
    scheduler = estimator.getLrScheduler()
    assert (scheduler.optimizer, scheduler.step_size, scheduler.gamma) == (optimizer, 3, 0.5)
    assert (type(kinds), kinds.weight.tolist(), kinds.label_smoothing) == (
        torch.nn.CrossEntropyLoss,
        [1.0, 2.0, 0.5],
        0.1,
    )
    assert (type(sizes), sizes.delta) == (torch.nn.HuberLoss, 2.0)
    assert estimator.getMetrics() == {"error": torch.nn.functional.l1_loss}
    assert_are_those_of_the_package(estimator.getCallbacks(), "val_error")


def test_an_estimator_with_code_of_ones_own(saved: Path, spark: Any) -> None:
    estimator = loaded("estimators/torch_own", saved, store="/data/rows", trusted=True)
    assert estimator.getOptimizer() is own_torch.adam
    assert estimator.getTrainFn() is own_torch.squared
    assert estimator.getLrScheduler() is own_torch.halved
    assert estimator.getTransformationFn() is own_torch.doubled
    assert estimator.getInferenceFn().func is own_torch.doubled
    assert estimator.getMetrics()["error"] == (1, own_torch.error)
    assert type(estimator.getMetrics()["median"][1]) is own_torch.Median
    impatient, told, steps, best = estimator.getCallbacks()
    assert (type(impatient), impatient.patience, isinstance(impatient, EarlyStopping)) == (own_torch.Impatient, 1, True)
    assert (type(told), told.on_epoch_end) == (LambdaCallback, own_torch.say)
    assert (type(steps), steps.log, steps.raises_at) == (own_torch.Steps, "/data/steps", 9)
    assert (type(best), best.monitor.name, best.restores_best) == (BestCheckpoint, "loss", True)
    launcher, discovery = estimator.getRunOptions()["launcher"], estimator.getRunOptions()["discovery"]
    assert (type(launcher), launcher.hosts, launcher.cores) == (LocalLauncher, ("127.0.0.1", "127.0.0.2"), 2)
    assert (type(discovery), discovery.find_available_hosts_and_slots()) == (FixedHosts, {"h1": 2})


@of_this_python
def test_an_estimator_of_a_notebook(saved: Path, spark: Any) -> None:
    estimator = loaded("estimators/torch_notebook", saved, trusted=True)
    net = estimator.getModel()
    assert type(net.norm) is hvd.SyncBatchNorm
    (callback,) = estimator.getCallbacks()
    assert isinstance(callback, EarlyStopping)
    assert (callback.patience, callback.monitor.name) == (1, "loss")
    batch = SimpleNamespace(inputs=[torch.ones(3, 4)], labels=[torch.tensor([0, 1, 2])])
    plain = torch.nn.functional.cross_entropy(net(*batch.inputs), batch.labels[0])
    assert estimator.getTrainFn()(net, batch).item() == pytest.approx(2 * plain.item())


@needs_keras
def test_an_estimator_of_keras_own_parts(saved: Path, spark: Any) -> None:
    import keras

    estimator = loaded("estimators/keras", saved)
    optimizer, loss, metrics = estimator.getOptimizer(), estimator.getLoss(), estimator.getMetrics()
    assert (type(optimizer), optimizer.momentum) == (keras.optimizers.SGD, 0.8)
    schedule = optimizer.get_config()["learning_rate"]
    assert (schedule["class_name"], schedule["config"]["initial_learning_rate"]) == ("ExponentialDecay", 0.5)
    assert type(loss["of_kind"]) is keras.losses.SparseCategoricalCrossentropy
    assert type(loss["of_size"]) is keras.losses.BinaryCrossentropy
    assert loss["of_size"].get_config()["label_smoothing"] == 0.1
    (error,) = metrics["of_size"]
    assert (metrics["of_kind"], type(error), error.name) == (["accuracy"], keras.metrics.MeanAbsoluteError, "error")
    assert_are_those_of_the_package(estimator.getCallbacks(), "val_of_size_error")


@needs_keras
def test_an_estimator_of_a_compiled_model_with_what_its_optimizer_has_learnt(saved: Path, spark: Any) -> None:
    import keras

    model = loaded("estimators/keras_compiled", saved).getModel()
    assert_close([each.tolist() for each in model.get_weights()], EXPECTED["estimators/keras_compiled weights"])
    slots = [np.asarray(each).tolist() for each in model.optimizer.variables]
    assert_close(slots, EXPECTED["estimators/keras_compiled slots"])
    assert type(model.loss) is keras.losses.CategoricalCrossentropy
    assert model.loss.get_config()["from_logits"] is True


@needs_keras
def test_an_estimator_of_keras_with_code_of_ones_own(saved: Path, spark: Any) -> None:
    import keras

    import spark_elastic.keras as khvd
    from tests.data import own_keras

    estimator = loaded("estimators/keras_own", saved, trusted=True)
    scaled, synchronised, _ = estimator.getModel().layers
    assert (type(scaled), scaled.factor) == (own_keras.Scaled, 0.5)
    assert type(synchronised) is khvd.SyncBatchNormalization
    assert type(estimator.getModel().loss) is own_keras.Offset
    assert estimator.getModel().loss.offset == 0.5
    (loss,) = estimator.getLoss()
    assert (type(loss), loss.offset) == (own_keras.Offset, 0.25)
    distance, error = estimator.getMetrics()
    assert (distance, error.name) == (own_keras.distance, "error")
    assert float(estimator.getOptimizer().learning_rate) == pytest.approx(0.03)
    stopping, plateau, best, told = estimator.getCallbacks()
    assert (type(stopping), stopping.patience) == (EarlyStopping, 2)
    assert (type(plateau), plateau.factor) == (keras.callbacks.ReduceLROnPlateau, 0.25)
    assert (type(best), best.filepath) == (khvd.BestModelCheckpoint, "/data/best.keras")
    assert (type(told), told.on_epoch_end) == (LambdaCallback, own_torch.say)
    assert estimator.getCustomObjects() == {"Scaled": own_keras.Scaled}
    assert estimator.getInferenceFn() is own_keras.tenfold


@needs_keras
@of_this_python
def test_a_callback_of_the_package_that_has_a_function_within(saved: Path, spark: Any) -> None:
    import keras

    import spark_elastic.keras as khvd

    estimator = loaded("estimators/keras_warmup", saved, trusted=True)
    (callback,) = estimator.getCallbacks()
    assert type(callback) is khvd.callbacks.LearningRateWarmupCallback
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    khvd.init()
    try:
        model.fit(saved_cases.few_rows(), np.ones(8), epochs=1, callbacks=[callback], verbose=0)
    finally:
        khvd.shutdown()
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1), "the whole of it, in a world of one"


# --- runs -------------------------------------------------------------------------------------------


def go_on(run: str, own_copy: Path, tmp_path: Path, **changes: Any) -> tuple[Any, list[list[int]]]:
    """The model that a run comes to, and (number of the step, what its callback has counted) for each step done now."""
    log = tmp_path / "steps"
    kind: Any = TorchHere
    settings, callbacks = saved_cases.of_torch, saved_cases.callbacks_of_torch
    if run == "keras":
        from tests.unit.ml.keras.estimators import HereEstimator as KerasHere

        kind, settings, callbacks = KerasHere, saved_cases.of_keras, saved_cases.callbacks_of_keras
    where = {"checkpoint_dir": str(own_copy / "runs"), "run_id": run}
    estimator = kind(**{**settings(), **where, **changes}, callbacks=callbacks(log))
    model = estimator.from_dataset_path(own_copy / "set")
    return model, [list(map(int, line.split())) for line in log.read_text().splitlines()]


def assert_is_the_whole_run(model: Any, run: str) -> None:
    """What it is also without an interruption.

    The bias in front of a normalisation has no effect on the loss, so its gradient is what rounding leaves of 0, which
    differs between processors, and which Adam makes as large as any other: of the bias, the mean it is normalised by
    and the numbers of validation, where that mean lags behind, no more can be said than how far such steps reach.
    """
    expected = EXPECTED[f"runs/{run}"]
    history = [without_times([row])[0] for row in expected["history"]]
    if run == "keras":
        assert_close(without_times(model.history), history)
        layers = enumerate(model.keras_model.layers)
        weights_of_run = [(f"{number}.{each.name}", each.numpy()) for number, layer in layers for each in layer.weights]
    else:
        weights_of_run = list(model.module.state_dict().items())
    validated = [name for name in history[0] if name.startswith("val_")]
    for found, each in zip(without_times(model.history), history, strict=True):
        assert [found.pop(name) for name in validated] == pytest.approx(
            [each.pop(name) for name in validated], rel=0.02
        )
        assert_close(found, each)
    for (name, value), weights in zip(weights_of_run, expected["weights"], strict=True):
        if name in ("0.bias", "1.running_mean", "1.moving_mean"):
            assert value.tolist() == pytest.approx(weights, abs=0.05 if run == "torch" else 1e-3)
        else:
            assert_close(value.tolist(), weights)


def without_times(history: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("seconds", "ended")} for row in history]


RUNS = [
    pytest.param("torch", marks=described_by("torch")),
    pytest.param("keras", marks=[needs_keras, described_by("keras")]),
]


@pytest.mark.parametrize("run", RUNS)
def test_an_interrupted_fit_goes_on_in_the_middle_of_its_epoch_to_the_same_end(
    run: str, own_copy: Path, tmp_path: Path
) -> None:
    expected = EXPECTED[f"runs/{run}"]
    model, steps = go_on(run, own_copy, tmp_path, **saved_cases.LASTING)
    behind = expected["count"] - expected["step"]
    assert steps == [[number, number + behind] for number in range(expected["step"] + 1, 25)]
    assert list(model.history[:2]) == expected["done"], "of these epochs the times are those of then, too"
    assert_is_the_whole_run(model, run)
    (owner,) = (own_copy / "runs" / run / "owners").iterdir()
    assert owner.name.startswith("000002-")


@described_by("torch")
def test_a_fit_that_was_done_goes_on_for_more_epochs(own_copy: Path, tmp_path: Path) -> None:
    model, steps = go_on("torch_done", own_copy, tmp_path)
    assert steps == [[number, number] for number in range(13, 25)]
    assert_is_the_whole_run(model, "torch")


@pytest.mark.parametrize("run", RUNS)
def test_a_run_knows_what_it_is_a_run_of(run: str, own_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has checkpoints of another training: seed was 5 and is 6"):
        go_on(run, own_copy, tmp_path, **saved_cases.LASTING, seed=6)
    assert not (tmp_path / "steps").exists()


# --- sets -------------------------------------------------------------------------------------------


def test_a_set_has_the_rows_that_were_written_in_the_same_orders(saved: Path) -> None:
    dataset = Dataset.open(saved / "store" / DATASETS / "kinds")
    dataset.verify()
    assert dataset.splits == ("train", "validation")
    for split, expected in EXPECTED["store kinds"].items():
        assert saved_cases.tensors(dataset, split) == expected
    for order, ids in EXPECTED["store orders"].items():
        assert saved_cases.in_order(dataset, order) == ids


def test_a_set_is_found_by_its_name_and_not_written_again(own_copy: Path, spark: Any) -> None:
    columns = "id long, pair array<double>, text string, bytes binary, some array<int>, two binary"
    empty = spark.createDataFrame([], f"{columns}, even boolean, aside boolean")
    vectors = spark.createDataFrame([(Vectors.dense([0.0]),)], ["vector"])
    df = empty.crossJoin(vectors)  # of the right columns, and without a row to write
    store, request = own_copy / "store", EXPECTED["store request"]
    manifest = (store / DATASETS / "kinds" / "manifest.json").read_bytes()
    dataset = materialize(df, **request, store=store, dataset_id="kinds", verbose=0)
    assert dataset.rows("train") == len(EXPECTED["store kinds"]["train"]["id"])
    assert (store / DATASETS / "kinds" / "manifest.json").read_bytes() == manifest
    with pytest.raises(DatasetError, match="was written with other settings: seed=3, not 4"):
        materialize(df, **{**request, "seed": 4}, store=store, dataset_id="kinds", verbose=0)


def test_a_set_that_an_earlier_version_reads_is_left_alone(own_copy: Path) -> None:
    store = own_copy / "store"
    assert clear_cache(store) == []
    (lease,) = (store / DATASETS / "kinds" / "leases").iterdir()
    lease.unlink()
    assert clear_cache(store) == ["kinds"]
    assert not (store / DATASETS / "kinds" / "manifest.json").exists()


# --- what users write -------------------------------------------------------------------------------


@pytest.fixture
def world_of_one() -> Any:
    hvd.init()
    yield
    hvd.shutdown()


def test_a_loop_of_ones_own_goes_on_with_its_model_its_optimizer_and_its_sampler(
    saved: Path, world_of_one: None
) -> None:
    states = torch.load(saved / "kept" / "torch.pt", weights_only=False)
    net = states["model"]
    assert isinstance(net[1], hvd.SyncBatchNorm)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=1.0), net.named_parameters())
    optimizer.load_state_dict(states["optimizer"])
    assert_close([saved_cases.step(net, optimizer) for _ in range(2)], EXPECTED["kept/torch next losses"])
    optimizer.detach()
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=True, seed=4)
    sampler.load_state_dict(states["sampler"])
    assert sampler.remaining_indices == EXPECTED["kept/torch left"]


@needs_keras
def test_a_keras_model_goes_on_with_its_optimizer(saved: Path, world_of_one: None) -> None:
    import spark_elastic.keras as khvd

    model = khvd.load_model(saved / "kept" / "keras.keras")
    assert type(model.layers[1]) is khvd.SyncBatchNormalization
    x, y = saved_cases.few_rows(), saved_cases.few_rows().sum(axis=1)
    assert_close([float(model.train_on_batch(x, y)) for _ in range(2)], EXPECTED["kept/keras next losses"])


def test_a_pickled_history(saved: Path) -> None:
    history = pickle.loads((saved / "kept" / "history.pkl").read_bytes())
    assert history == History(EXPECTED["kept/history"])
