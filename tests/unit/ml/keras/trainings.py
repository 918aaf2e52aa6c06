"""A small training in float64, to be done in any world, and callbacks that end a worker at a chosen moment.

What is random is the same in every process: initial weights have seeds of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.engine import MODEL_FILE
from spark_elastic.ml.keras.pickling import KerasPickle
from spark_elastic.ml.keras.serialization import arrays_from_bytes
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.keras.train import train
from spark_elastic.ml.training.spec import CheckpointPlan
from tests.unit.ml import in_worlds
from tests.unit.ml.in_worlds import (
    BATCH,
    EPOCHS,
    ROWS,
    STEPS,
    VALIDATION_ROWS,
    At,
    EpochCounter,
    assert_same_outcome,
    at_call,
    plain_outcome,
)

TOLERANCE = 1e-11


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make Keras compute in float64, because losses and metrics do not take the type of their inputs."""
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


precise = in_float64

SETS: dict[str, tuple[str, ...]] = {
    "plain": ("features_0", "label_0"),
    "weighted": ("features_0", "label_0", "sample_weight"),
    "two inputs": ("features_0", "features_1", "label_0"),
    "two outputs": ("features_0", "features_1", "label_0", "label_1"),
}


def make_sets(folder: Path) -> Path:
    """Write the datasets of `SETS` from the same rows; return the folder."""
    generator = np.random.default_rng(7)
    truth = generator.normal(size=(6, 3))

    def rows(count: int) -> dict[str, Any]:
        features = generator.normal(size=(count, 6))
        return {
            "features_0": features,
            "label_0": (features @ truth).argmax(1),
            "label_1": features @ truth[:, :1] + 1.0,
            "features_1": (np.abs(features[:, :4]) * 10).astype(np.int64) % 7,
            "sample_weight": generator.uniform(0.1, 2.0, size=count),
        }

    train_rows, validation_rows = rows(ROWS), rows(VALIDATION_ROWS)
    for name, fields in SETS.items():
        train_part, validation_part = ({key: part[key] for key in fields} for part in (train_rows, validation_rows))
        pack(train_part, folder / name, validation=validation_part, shards=3)
    return folder


def dense(units: int, seed: int, **options: Any) -> keras.layers.Dense:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


def make_net(*, dropout: float = 0.0, norm: bool = False, kind: Any = keras.Sequential) -> Any:
    layers: list[Any] = [dense(8, 1, activation="tanh", name="first"), dense(3, 2, name="last")]
    if norm:
        layers.insert(1, keras.layers.BatchNormalization(name="norm", momentum=0.9))
    if dropout:
        layers.insert(-1, keras.layers.Dropout(dropout, name="dropout"))
    return kind([keras.Input((6,)), *layers])


@keras.saving.register_keras_serializable("trainings")
class LabelSum(keras.metrics.Metric):
    """A metric that shows the rows that were seen."""

    def __init__(self, name: str = "label_sum", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, self.dtype)))

    def result(self) -> Any:
        return self.total + 0.0


def cross_entropy(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def compiled(**changes: Any) -> CompileArguments:
    settings: dict[str, Any] = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": cross_entropy(),
        "metrics": ["accuracy", LabelSum()],
        **changes,
    }
    return CompileArguments(**settings)


COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")


def make_training(data: Path, folder: Path, **changes: Any) -> KerasTraining:
    """Make a training with changed settings or arguments of `compile`; `rows` is one of `SETS`."""
    chosen = data / changes.pop("rows", "plain")
    with in_float64():
        net = changes.pop("model", None) or make_net()
        made = {name: changes.pop(name) for name in COMPILED if name in changes}
        callbacks = changes.pop("callbacks", [])
        settings: dict[str, Any] = {
            "model": KerasPickle.of(net),
            "compiled": KerasPickle.of(compiled(**made)),
            "callbacks": KerasPickle.of(callbacks),
            "batch_size": BATCH,
            "epochs": EPOCHS,
            "checkpoints": CheckpointPlan(every_epochs=1),
            "verbose": 0,
            **changes,
        }
    return KerasTraining(dataset=Dataset.open(chosen), store=Store.create(folder), **settings)


def outcome(training: KerasTraining) -> dict[str, Any]:
    """Train, and return the result as plain values."""
    with in_float64():
        return plain_outcome(train(training), hvd.size())


def alone(training: KerasTraining) -> dict[str, Any]:
    """Train in this process, a world of one."""
    try:
        return outcome(training)
    finally:
        hvd.shutdown()


def weights(folder: Path) -> list[float]:
    found = arrays_from_bytes((folder / MODEL_FILE).read_bytes())
    return [float(number) for array in found.values() for number in array.reshape(-1).tolist()]


def assert_as_undisturbed(result: Mapping[str, Any], folder: Path, undisturbed: tuple[Any, Any]) -> None:
    assert_same_outcome(result, weights(folder), undisturbed, TOLERANCE)


def close(expected: Any) -> Any:
    return in_worlds.close(expected, TOLERANCE)


# --- variants ---------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("trainings")
class OwnStep(keras.Sequential):
    """A model with its own train_step and test_step, which return values that are not metrics."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "half": loss / 2}

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"loss": self.compute_loss(y=y, y_pred=self(x, training=False))}


@keras.saving.register_keras_serializable("trainings")
class Counting(keras.layers.Layer):
    """A layer that every forward pass of the training changes."""

    def build(self, shape: Any) -> None:
        self.passes = self.add_weight(name="passes", shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.passes.assign_add(1.0)
        return x * (1 + 0.1 * self.passes)


def embedded(last: Any = None) -> Any:
    numbers, words = keras.Input((6,), name="numbers"), keras.Input((4,), dtype="int64", name="words")
    table = keras.layers.Embedding(7, 5, embeddings_initializer=keras.initializers.RandomUniform(seed=4))
    both = keras.layers.concatenate([numbers, keras.layers.Flatten()(table(words))])
    outputs = dense(3, 2, name="kind")(both)
    return keras.Model([numbers, words], outputs if last is None else last(outputs))


def two_headed() -> Any:
    numbers, words = keras.Input((6,), name="numbers"), keras.Input((4,), name="words")
    both = keras.layers.concatenate([dense(5, 1, activation="tanh")(numbers), words])
    outputs = {"kind": dense(3, 2, name="kind")(both), "size": dense(1, 3, name="size")(both)}
    return keras.Model({"numbers": numbers, "words": words}, outputs)


def regularised() -> Any:
    layer = dense(8, 1, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    return keras.Sequential([keras.Input((6,)), layer, dense(3, 2)])


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {"features_0": columns["features_0"] * 2, "label_0": columns["label_0"]}


def own_mean(y_true: Any, y_pred: Any) -> Any:
    """A value for each row."""
    wanted = keras.ops.one_hot(keras.ops.cast(y_true, "int64"), 3)
    return keras.ops.mean(keras.ops.square(wanted - y_pred), axis=-1)


def less_every_step() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 5, 0.7))


VARIANTS: dict[str, dict[str, Any]] = {
    "parts, bounds and another seed": {"accumulation_steps": 3, "gradient_clip_norm": 0.05, "seed": 5, "prefetch": 0},
    "Adam, bounds and no shuffle": {
        "optimizer": lambda: keras.optimizers.AdamW(0.02),
        "gradient_clip_value": 0.01,
        "shuffle": False,
        "transformation_fn": doubled,
    },
    "averages of weights": {
        "optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, global_clipnorm=0.05)
    },
    "a schedule and regularisation": {"optimizer": less_every_step, "model": regularised},
    "a loss and metrics of another kind": {
        "loss": lambda: own_mean,
        "metrics": lambda: [
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
            keras.metrics.MeanIoU(3, sparse_y_pred=False),
        ],
    },
    "a train_step of one's own": {"model": lambda: make_net(kind=OwnStep)},
    "divided by sample weights": {
        "rows": "weighted",
        "weighted_metrics": ["accuracy"],
        "loss": lambda: cross_entropy(reduction="mean_with_sample_weight"),
    },
    "sparse gradients in parts": {
        "model": embedded,
        "rows": "two inputs",
        "optimizer": lambda: keras.optimizers.Adam(0.02),
        "gradient_clip_norm": 0.5,
        "accumulation_steps": 2,
    },
    "two outputs": {
        "model": two_headed,
        "rows": "two outputs",
        "loss": lambda: {"kind": cross_entropy(), "size": "mse"},
        "loss_weights": {"kind": 1.0, "size": 0.3},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    },
    "batch normalisation, fewer rows than workers": {
        "model": lambda: make_net(norm=True),
        "batch_size": (ROWS - 2) // 3,
        "gradient_clip_norm": 0.5,
    },
    "batches of two rows, fewer than workers": {
        "batch_size": 2,
        "epochs": 1,
        "model": lambda: embedded(Counting()),
        "rows": "two inputs",
        "optimizer": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=3),
    },
}
"""Settings under which the result must not depend on the world."""

WORLDLY: dict[str, dict[str, Any]] = {
    "a batch for each worker": {"batch_size": None, "per_worker_batch_size": BATCH},
    "compressed": {"gradient_compression": "bf16"},
}
"""And settings under which it does."""


def variant_of(name: str) -> dict[str, Any]:
    """Return the settings of a variant, with new models, optimizers and losses."""
    with in_float64():
        return {
            key: value() if key in (*COMPILED, "model") and isinstance(value, type(make_net)) else value
            for key, value in {**VARIANTS, **WORLDLY}[name].items()
        }


def settings_of(name: str) -> dict[str, Any]:
    """Make the settings of a resumed training anew, as another process would."""
    if name == "plain":
        return {}
    with in_float64():
        return {
            "model": make_net(dropout=0.3, norm=True),
            "optimizer": keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.02, 50)),
            "callbacks": [keras.callbacks.EarlyStopping("loss", restore_best_weights=True)],
        }


# --- what workers do, for a WorldDriver ---------------------------------------------------------------


def in_worker(data: Path, folder: Path, plans: Mapping[int, tuple[Any, ...]], changes: Mapping[str, Any] | None = None):
    """Train in a worker of a `WorldDriver`.

    `plans` has the moment at which a worker ends: ("on_batch_end", 7), ("before a reduction", 3).
    """
    from tests.unit.world_link import die, link

    callbacks: list[Any] = []
    for worker, (kind, count) in plans.items():
        action = die if worker == link().worker else _nothing
        if kind.startswith("on_"):  # all workers have the same callbacks
            callbacks.append(At(kind, count, action))
        elif worker == link().worker:
            _die_within(kind, count)
    changes = dict(changes or {})
    if "norm" in changes:
        with in_float64():
            changes["model"] = make_net(norm=changes.pop("norm"))
    training = make_training(data, folder, callbacks=[*changes.pop("callbacks", []), *callbacks], **changes)
    return outcome(training)


def _nothing() -> None: ...


def _die_within(kind: str, count: int) -> None:
    """Let this process end at the `count`-th time."""
    from spark_elastic.collective import batch_statistics
    from spark_elastic.collective.fused import FusedReduction
    from spark_elastic.ml.keras.engine import KerasEngine
    from tests.unit.world_link import die

    place, name = {
        "in a layer's reduction": (batch_statistics, "sum_over_group"),
        "before a reduction": (FusedReduction, "__call__"),
        "after a reduction": (FusedReduction, "__call__"),
        "in a validation": (KerasEngine, "measure"),
        "while the model is written": (KerasEngine, "model_file"),
    }[kind]
    plain_method, dies = getattr(place, name), at_call(count, die)

    def method(*args: Any, **options: Any) -> Any:
        if kind != "after a reduction":
            dies()
        result = plain_method(*args, **options)
        if kind == "after a reduction":
            dies()
        return result

    setattr(place, name, method)


def in_worker_variants(data: Path, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Train the variants one after the other in one world."""
    from tests.unit.world_link import tell

    results = {}
    for name in names:
        results[name] = outcome(make_training(data, folder / name, **variant_of(name)))
        tell("trained", name)  # a test waits only as long as something happens
    return results


def in_worker_slowly(data: Path, folder: Path) -> Any:
    counter = EpochCounter(STEPS - 5, pause_s=0.1)
    training = make_training(data, folder)
    from spark_elastic.ml.keras import engine

    plain_adapted = engine.adapt_callbacks

    def with_counter(callbacks: Any, *rest: Any) -> Any:
        return [*plain_adapted(callbacks, *rest), counter]

    engine.adapt_callbacks = with_counter
    return {**outcome(training), "epochs counted": counter.epochs}
