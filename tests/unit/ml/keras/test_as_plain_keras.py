"""What users bring to Keras, by two workers: as plain Keras in one process makes of the same batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from spark_elastic.data.dataset import pack
from spark_elastic.ml.keras import compiling
from tests.nightly import asked, by_night
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import close, make_training, outcome
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver

layers = keras.layers
LONGEST, WIDTH, CLASSES, BATCH, EPOCHS = 6, 3, 3, 8, 2
ROWS = 43
"""The last batch has three rows, of which one worker has two."""

# --- models -------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("as_plain_keras")
class ShortStep(keras.Sequential):
    """A train_step that keeps a mean of the losses of batches, as many examples do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        x, y, *weights = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True), sample_weight=weights[0] if weights else None)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@keras.saving.register_keras_serializable("as_plain_keras")
class OwnStep(keras.Model):
    """A train_step as in Keras' guides, which takes and returns dicts, with a metric and a value of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.longest = keras.metrics.Mean(name="longest")

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.longest]

    def train_step(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.longest.update_state(keras.ops.max(keras.ops.abs(outputs["tags"]), axis=-1))
        self._loss_tracker.update_state(loss, sample_weight=keras.ops.shape(x)[0])
        return {**self.compute_metrics(x, y, outputs, sample_weight=weights), "longest": self.longest.result()}


@keras.saving.register_keras_serializable("as_plain_keras")
class Largest(keras.metrics.Metric):
    """A count of rows by their class, and a sum of the largest outputs."""

    def __init__(self, name: str = "largest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.classes = self.add_weight(name="classes", shape=(CLASSES,), initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        numbers = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        self.classes.assign_add(keras.ops.sum(keras.ops.one_hot(numbers, CLASSES, dtype=self.dtype), axis=0))
        self.total.assign_add(keras.ops.sum(keras.ops.cast(keras.ops.max(y_pred, axis=-1), self.dtype)))

    def result(self) -> Any:
        return self.total / keras.ops.sum(keras.ops.square(self.classes))


def tagger() -> Any:
    """Make a model of masked sequences; the mask goes through both wrappers to the loss."""
    x = keras.Input((LONGEST, WIDTH), name="steps")
    hidden = layers.Masking(0.0)(x)
    hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(hidden)
    return keras.Model(x, layers.TimeDistributed(layers.Dense(CLASSES))(hidden))


def two_headed() -> Any:
    """Make a model with two outputs in a dict, of which one has a mask."""
    x = keras.Input((LONGEST, WIDTH), name="steps")
    hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(layers.Masking(0.0)(x))
    tags = layers.TimeDistributed(layers.Dense(CLASSES), name="tags")(hidden)
    size = layers.Dense(1, name="size")(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(x, {"tags": tags, "size": size})


def averaging() -> Any:
    return ShortStep([keras.Input((WIDTH,)), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)])


def two_dense_heads(kind: Any = keras.Model) -> Any:
    x = keras.Input((WIDTH,), name="numbers")
    hidden = layers.Dense(8, activation="tanh")(x)
    return kind(x, {"tags": layers.Dense(CLASSES, name="tags")(hidden), "size": layers.Dense(1, name="size")(hidden)})


def softmax() -> Any:
    return keras.Sequential([keras.Input((WIDTH,)), layers.Dense(CLASSES, activation="softmax")])


@keras.saving.register_keras_serializable("as_plain_keras")
class Unused(layers.Layer):
    """A layer with another one that its call leaves out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.base, self.never = layers.Dense(CLASSES), layers.Dense(CLASSES)

    def build(self, shape: Any) -> None:
        self.base.build(shape)
        self.never.build(shape)
        self.built = True

    def call(self, features: Any) -> Any:
        return self.base(features)


def unused() -> Any:
    return keras.Sequential([keras.Input((WIDTH,)), Unused()])


def sgd(**more: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **more)


def of_words() -> Any:
    """Make a model of words that come several times in a batch, so its sparse gradient has equal indices."""
    middle = [layers.Embedding(CLASSES, 4), layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((LONGEST,), dtype="int64"), *middle, layers.Dense(CLASSES)])


# --- cases --------------------------------------------------------------------------------------------

CROSS_ENTROPY = partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


def columns_of(case: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the rows of a case by the names of a dataset's tensors."""
    generator = np.random.default_rng(5)
    kept = np.arange(LONGEST) < generator.integers(1, LONGEST + 1, (rows, 1))
    steps = generator.normal(size=(rows, LONGEST, WIDTH)) * kept[:, :, None]
    found = {
        "steps": steps,
        "numbers": steps[:, 0],
        "tags": steps.argmax(-1) * kept,
        "tag": steps[:, 0].argmax(-1),
        "one hot": np.eye(CLASSES)[steps[:, 0].argmax(-1)],
        "size": steps.sum((1, 2))[:, None],
        "weight": generator.uniform(0.1, 2.0, rows) * (np.arange(rows) % 5 > 0),
    }
    inputs, labels = case["columns"]
    made = {f"features_{at}": found[name] for at, name in enumerate(inputs)}
    made |= {f"label_{at}": found[name] for at, name in enumerate(labels)}
    return {**made, "sample_weight": found["weight"]} if case.get("weighted") else made


def of_heads() -> dict[str, Any]:
    return {"tags": CROSS_ENTROPY(), "size": keras.losses.Huber()}


def stateful() -> list[Any]:
    metrics = keras.metrics
    return [
        *(metrics.CategoricalAccuracy(), metrics.Precision(), metrics.Recall(class_id=1), metrics.F1Score("macro")),
        *(metrics.AUC(num_thresholds=20), metrics.AUC(num_thresholds=10, multi_label=True, name="by_class")),
        *(metrics.OneHotMeanIoU(CLASSES), metrics.R2Score(), metrics.RootMeanSquaredError()),
        metrics.SensitivityAtSpecificity(0.5, num_thresholds=20),
    ]


SEQUENCES, NUMBERS, HEADS = (["steps"], ["tags"]), (["numbers"], ["tag"]), (["steps"], ["size", "tags"])
CASES: dict[str, dict[str, Any]] = {
    "mask through Bidirectional and TimeDistributed": {
        "columns": SEQUENCES,
        "model": tagger,
        "compile": lambda: {"loss": CROSS_ENTROPY(), "metrics": ["accuracy", Largest()]},
    },
    "mask, weights and a class that is ignored": {
        "columns": SEQUENCES,
        "weighted": True,
        "model": tagger,
        "compile": lambda: {"loss": CROSS_ENTROPY(ignore_class=1, reduction="mean_with_sample_weight")},
    },
    "train_step with a mean of losses": {
        "columns": NUMBERS,
        "weighted": True,
        "model": averaging,
        "compile": lambda: {"loss": CROSS_ENTROPY()},
    },
    "dicts of outputs, losses and weights": {
        "columns": HEADS,
        "weighted": True,
        "model": two_headed,
        "compile": lambda: {
            "loss": of_heads(),
            "loss_weights": {"tags": 0.3, "size": 2.0},
            "metrics": {"tags": ["accuracy"], "size": ["mae", keras.metrics.RootMeanSquaredError()]},
            "weighted_metrics": {"size": ["mse"]},
        },
    },
    "train_step with dicts": {
        "columns": (["numbers"], ["size", "tag"]),
        "weighted": True,
        "model": partial(two_dense_heads, OwnStep),
        "compile": lambda: {"loss": of_heads(), "loss_weights": {"tags": 0.3, "size": 2.0}},
    },
    "metrics with states": {
        "columns": (["numbers"], ["one hot"]),
        "model": softmax,
        "compile": lambda: {"loss": keras.losses.CategoricalCrossentropy(), "metrics": stateful()},
    },
    "sparse gradients": {
        "columns": (["tags"], ["tag"]),
        "model": of_words,
        "compile": lambda: {"loss": CROSS_ENTROPY()},
    },
    "sparse gradients, Keras' bound of each norm": {
        "columns": (["tags"], ["tag"]),
        "model": of_words,
        "compile": lambda: {"loss": CROSS_ENTROPY(), "optimizer": sgd(clipnorm=0.05)},
    },
    "a layer that is not called": {
        "columns": NUMBERS,
        "model": unused,
        "compile": lambda: {"loss": CROSS_ENTROPY(), "optimizer": sgd(weight_decay=0.1)},
    },
    "an output without a loss": {
        "columns": NUMBERS,
        "model": two_dense_heads,
        "compile": lambda: {"loss": {"tags": CROSS_ENTROPY()}, "optimizer": keras.optimizers.AdamW(0.05)},
        "settings": {"accumulation_steps": 2},
    },
    "mixed_float16": {
        "columns": (["numbers"], ["size", "tag"]),
        "weighted": True,
        "model": partial(two_dense_heads, OwnStep),
        "compile": lambda: {"loss": of_heads(), "loss_weights": {"tags": 0.3, "size": 2.0}},
        "policy": "mixed_float16",
    },
}


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a new model of a case, and the arguments of `compile`; they are the same in every process."""
    case = CASES[name]
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(case.get("policy", "float64"))
    model, arguments = case["model"](), case["compile"]()
    return model, {"optimizer": keras.optimizers.Adam(0.01), **arguments}


def plain(name: str, rows: int) -> tuple[list[float], list[dict[str, float]]]:
    """Train with plain Keras in this process; return the weights, and a history of the epochs."""
    columns = columns_of(CASES[name], rows)
    with trainings.in_float64():
        model, arguments = made(name)
        model.compile(**arguments)
        x, y = columns["features_0"], labels_of(columns, arguments["loss"])
        options = {"sample_weight": weights_by_output(columns, y), "batch_size": BATCH, "shuffle": False, "verbose": 0}
        fitted = model.fit(x, y, epochs=EPOCHS, **options)
        return weights_of(model), by_epoch(fitted)


def labels_of(columns: dict[str, Any], loss: Any) -> Any:
    if "label_1" not in columns:
        return dict.fromkeys(loss, columns["label_0"]) if isinstance(loss, dict) else columns["label_0"]
    return {"size": columns["label_0"], "tags": columns["label_1"]}


def weights_by_output(columns: dict[str, Any], labels: Any) -> Any:
    """Return the weights of the rows as plain Keras needs them: where there is a mask, one for each element."""
    if "sample_weight" not in columns:
        return None
    weights = columns["sample_weight"]

    def of(label: Any) -> Any:
        return np.repeat(weights[:, None], LONGEST, 1) if label.shape[1:] == (LONGEST,) else weights

    return keras.tree.map_structure(of, labels)


def weights_of(model: Any) -> list[float]:
    return [float(number) for value in model.get_weights() for number in value.reshape(-1)]


def by_epoch(fitted: Any) -> list[dict[str, float]]:
    return [{name: values[at] for name, values in fitted.history.items()} for at in range(EPOCHS)]


# --- the estimator ------------------------------------------------------------------------------------


def as_estimator(data: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    """Train the cases one after the other, as the workers of an `ElasticKerasEstimator` do."""
    results = {}
    for name in names:
        with trainings.in_float64():
            model, arguments = made(name)
            compiled = compiling.compile_arguments(model, **arguments)
            changes = {each: getattr(compiled, each) for each in trainings.COMPILED}
            settings = {"rows": name, "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
            settings |= CASES[name].get("settings", {})
            training = make_training(data, folder / name, model=model, **settings, **changes)
            results[name] = outcome(training)["history"]
        tell("trained", name)
    return results


BY_DAY = {"dicts of outputs, losses and weights"}


@pytest.fixture(scope="module")
def by_estimator(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    names = asked(request, "name")
    data, folder = tmp_path_factory.mktemp("rows"), tmp_path_factory.mktemp("trained")
    for name in names:
        pack(columns_of(CASES[name], ROWS), data / name, shards=2)
    with WorldDriver(start_with=2) as driver:
        driver.start(as_estimator, data, folder, names, count=2)
        for name in names:
            driver.wait(lambda name=name: driver.told("trained").count(name) == 2)
        first, second = driver.results(2)
    assert first == second
    return {name: (trainings.weights(folder / name), first[name]) for name in names}


@pytest.mark.parametrize("name", by_night(CASES, but=BY_DAY))
def test_two_workers_of_an_estimator_train_as_plain_keras(name: str, by_estimator: Any) -> None:
    expected, history = plain(name, ROWS)
    weights, rows = by_estimator[name]
    assert weights == as_computed(name, expected)
    for found, wanted in zip(rows, history, strict=True):
        # plain Keras reports a mean over batches for the loss of each output, whatever the number of their rows
        whole = {each: value for each, value in wanted.items() if not each.endswith("_loss")}
        assert {each: found[each] for each in whole} == as_computed(name, whole)


def as_computed(name: str, expected: Any) -> Any:
    if "policy" in CASES[name]:  # half precision
        return pytest.approx(expected, rel=1e-2, abs=2e-3)
    if isinstance(expected, dict):
        flat = {each: np.asarray(value).reshape(-1).tolist() for each, value in expected.items()}
        return {each: close(value if len(value) > 1 else value[0]) for each, value in flat.items()}
    return close(expected)
