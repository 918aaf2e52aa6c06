"""Trainings of Keras with consistency="exact": the same bits in every world, through kills and after a resume."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from spark_elastic import ElasticKerasEstimator
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.checkpoints import Checkpoints
from spark_elastic.ml.keras.engine import ARRAYS, MODEL_FILE
from spark_elastic.ml.keras.serialization import arrays_from_bytes
from spark_elastic.ml.keras.training import set_threads
from spark_elastic.ml.training.spec import CHECKPOINTS
from tests.unit.keras.exact_loops import digest
from tests.unit.ml.in_worlds import Telling, kill_and_add
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.estimators import settings
from tests.unit.worlds import WorldDriver


def in_float32(rate: float = 0.3) -> Any:
    layers = [
        trainings.dense(8, 1),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Dropout(rate),
        trainings.dense(3, 2),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def noisy(columns: dict[str, Any]) -> dict[str, Any]:
    features = columns["features_0"]
    return {**columns, "features_0": features + 0.1 * np.random.normal(size=features.shape)}


class Draws(keras.callbacks.Callback):
    """Sets the learning rate by chance, at all events before which other workers may have drawn other numbers."""

    def _draw(self, *args: Any, logs: Any = None) -> None:
        drawn = random.random() + np.random.random() + float(keras.random.uniform([])) + float(tf.random.uniform([]))
        self.model.optimizer.learning_rate = 0.01 * (1.0 + drawn)

    on_train_begin = on_epoch_begin = on_epoch_end = on_train_batch_begin = on_train_batch_end = _draw
    on_test_begin = on_test_batch_begin = on_test_batch_end = on_test_end = _draw


@keras.saving.register_keras_serializable("test_exact")
class Noisy(keras.layers.Layer):
    """Adds noise of a generator of TensorFlow, also when it is evaluated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x: Any) -> Any:
        return x + 0.1 * self.generator.normal(tf.shape(x), dtype=x.dtype)


def noisy_model() -> Any:
    return keras.Sequential([keras.Input((6,)), trainings.dense(8, 1), Noisy(), trainings.dense(3, 2)])


@keras.saving.register_keras_serializable("test_exact")
class Smoothed(keras.losses.Loss):
    """A loss that draws from a generator of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        noise = tf.cast(self.generator.uniform([]), y_pred.dtype)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred * (1.0 + noise), from_logits=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout, batch normalisation, momentum, a schedule, clipping": {
        "model": in_float32,
        "optimizer": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9), momentum=0.9
        ),
        "clip_norm": 0.1,
        "transformation_fn": noisy,
    },
    "an embedding, Adam, parts, a plateau, learning rates by chance": {
        "model": trainings.embedded,
        "rows": "two inputs",
        "optimizer": lambda: keras.optimizers.Adam(0.02),
        "accumulation": 2,
        "callbacks": lambda: [keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0), Draws()],
        "metrics": lambda: ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    },
    "random generators of a layer and of the loss": {
        "model": noisy_model,
        "loss": Smoothed,
        "epochs": 2,
    },
    "sample weights, a train_step of one's own, one row in some shards": {
        "rows": "weighted",
        "loss": lambda: trainings.cross_entropy(reduction="mean_with_sample_weight"),
        "weighted_metrics": ["accuracy"],
        "batch_size": 67,
        "epochs": 2,
    },
}
MADE = ("model", "optimizer", "callbacks", "metrics", "loss")


def outcome(data: Path, folder: Path, variant: str, virtual: int, **more: Any) -> str:
    """The hash of the history, the weights, and all arrays of the last checkpoint."""
    set_threads(more.get("num_threads", 1))  # a model computes when it is built
    chosen = {key: value() if key in MADE and callable(value) else value for key, value in VARIANTS[variant].items()}
    callbacks = [*chosen.pop("callbacks", []), *more.pop("callbacks", [])]
    training = trainings.make_training(data, folder, virtual_workers=virtual, callbacks=callbacks, **{**chosen, **more})
    result = trainings.plain_outcome(trainings.train(training), 0)
    result.pop("caused_divergence")
    weights = arrays_from_bytes((folder / MODEL_FILE).read_bytes())
    return digest([json.dumps(result, sort_keys=True, default=str), weights])


def optimizer_of(folder: Path) -> str:
    """The hash of all arrays in the last checkpoint: model, moving statistics, seeds, optimizer, callbacks."""
    checkpoints = Checkpoints(Store.create(folder).sub(CHECKPOINTS))
    found = checkpoints.load(checkpoints.latest().name)
    return digest(arrays_from_bytes(found.files[ARRAYS]))


def all_variants(data: Path, folder: Path, virtual: int) -> list[str]:
    found = []
    for number, name in enumerate(VARIANTS):
        found.append(outcome(data, folder / str(number), name, virtual, callbacks=[Telling()]))
    return found


def in_world(size: int, function: Any, *args: Any) -> list[Any]:
    with WorldDriver(start_with=size) as driver:
        driver.start(function, *args, count=size)
        return driver.results(size)


def last_checkpoints(folder: Path) -> list[str]:
    return [optimizer_of(folder / str(number)) for number in range(len(VARIANTS))]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> tuple[list[str], list[str]]:
    folder = tmp_path_factory.mktemp("alone")
    (results,) = in_world(1, all_variants, data, folder, 4)
    return results, last_checkpoints(folder)


@pytest.mark.parametrize("size", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_the_number_of_workers_changes_no_bit(size, data, alone, tmp_path):
    assert in_world(size, all_variants, data, tmp_path, 4) == [alone[0]] * size
    assert last_checkpoints(tmp_path) == alone[1]


def telling(data: Path, folder: Path, variant: str, virtual: int) -> str:
    return outcome(data, folder, variant, virtual, callbacks=[Telling()])


def storm(seed: int, data: Path, folder: Path, expected: dict[tuple[str, int], str]) -> None:
    kind = list(VARIANTS)[seed % len(VARIANTS)], [2, 4, 3, 8][seed % 4]
    if kind not in expected:
        (expected[kind],) = in_world(1, outcome, data, folder / "alone", *kind)
    start = (telling, data, folder / "killed", *kind)
    with WorldDriver(start_with=3) as driver:
        driver.start(*start, count=3)
        kill_and_add(driver, random.Random(seed), lambda: driver.start(*start))
        for result in driver.results(1):
            assert result == expected[kind], f"schedule {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
def test_kills_and_arrivals_change_no_bit(seed, data, tmp_path):
    storm(seed, data, tmp_path, {})


@pytest.mark.soak
def test_a_hundred_schedules_of_kills_and_arrivals_change_no_bit(data, tmp_path):
    """SOAK_SEED: the first schedule; SOAK_SCHEDULES: their number."""
    expected: dict[tuple[str, int], str] = {}
    first = int(os.environ.get("SOAK_SEED", "100"))
    for seed in range(first, first + int(os.environ.get("SOAK_SCHEDULES", "100"))):
        storm(seed, data, tmp_path / str(seed), expected)
        print(f"schedule {seed} ok", flush=True)


def whole(data: Path, folder: Path, variant: str) -> tuple[str, str]:
    result = outcome(data, folder, variant, 4)
    return result, Checkpoints(Store.create(folder).sub(CHECKPOINTS)).complete()[0].name


def resumed(data: Path, folder: Path, variant: str, name: str) -> str:
    return outcome(data, folder, variant, 4, resume_from=name)


def test_resume_with_another_number_of_workers_changes_no_bit(data, tmp_path, alone):
    variant = next(iter(VARIANTS))
    ((result, name),) = in_world(1, whole, data, tmp_path, variant)
    assert result == alone[0][0]
    assert in_world(3, resumed, data, tmp_path, variant, name) == [result] * 3


def with_other_settings(data: Path, folder: Path, variant: str) -> tuple[str, list[str]]:
    """The error with other shards, and the warnings with other threads."""
    import logging

    name = Checkpoints(Store.create(folder).sub(CHECKPOINTS)).complete()[0].name
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spark_elastic").addHandler(handler)
    with pytest.raises(Exception, match="virtual_workers is 2") as caught:
        outcome(data, folder, variant, 2, resume_from=name, num_threads=2)
    outcome(data, folder, variant, 4, resume_from=name, num_threads=2)
    return str(caught.value), said


def test_resume_with_other_threads_is_a_warning_and_with_other_shards_an_error(data, tmp_path):
    variant = next(iter(VARIANTS))
    in_world(1, whole, data, tmp_path, variant)
    ((error, said),) = in_world(1, with_other_settings, data, tmp_path, variant)
    assert "virtual_workers=4, but virtual_workers is 2" in error
    assert any("threads is 2, and was 1" in each for each in said)


# --- the estimator ------------------------------------------------------------------------------------


class Recording(ElasticKerasEstimator):
    """Records the settings that a worker would get, and trains nothing: this process keeps its threads."""

    def _run_job(self, training: Any, context: Any, *events: Any) -> list[Any]:
        raise Recorded(training)


class Recorded(Exception):
    pass


def recorded(data: Path, folder: Path, **changes: Any) -> Any:
    with pytest.raises(Recorded) as caught:
        Recording(**settings(store=str(folder), **changes)).from_dataset_path(str(data / "plain"))
    return caught.value.args[0]


def test_estimator_trains_in_as_many_shards_as_it_may_have_workers(data, tmp_path):
    assert recorded(data, tmp_path, consistency="exact", max_num_proc=3).virtual_workers == 3
    assert recorded(data, tmp_path, consistency="exact", virtual_workers=6).virtual_workers == 6
    assert recorded(data, tmp_path).virtual_workers is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"virtual_workers": 4}, "without consistency='exact'"),
        ({"consistency": "exact", "batch_size": None, "per_worker_batch_size": 8}, "per_worker_batch_size=8"),
        ({"consistency": "exact", "gradient_compression": "fp16"}, "gradient_compression='fp16'"),
        ({"consistency": "exact", "sync_batch_norm": True}, "sync_batch_norm=True"),
        ({"consistency": "exact", "num_proc": None, "run_options": None}, "needs virtual_workers"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes, said):
    with pytest.raises(InvalidSettingsError, match=said):
        Recording(**settings(**changes))._check_complete(from_columns=False)


@keras.saving.register_keras_serializable("test_exact")
class DrawingLayer(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


def test_random_operations_that_count_their_calls_are_refused_before_any_worker_starts(data, tmp_path):
    model = keras.Sequential([keras.Input((6,)), DrawingLayer(), keras.layers.Dense(3)])
    made = Recording(**settings(model=model, store=str(tmp_path), consistency="exact", max_num_proc=3))
    with pytest.raises(InvalidSettingsError, match=r"RandomStandardNormal.*SeedGenerator"):
        made.from_dataset_path(str(data / "plain"))
