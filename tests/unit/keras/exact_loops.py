"""A loop with virtual workers in Keras, to be run in any world, and the hash of all that it comes to."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import spark_elastic.keras as hvd
from spark_elastic.data.order.permutation import Permutation

ROWS, BATCH, EPOCHS = 107, 24, 3
"""Batches of 24 rows and a last one of 11."""
WORDS = 30


@keras.saving.register_keras_serializable("exact_loops")
class Counter(keras.layers.Layer):
    """Counts its calls and rows; adds noise of a generator of its own, and of TensorFlow's and Keras' global ones."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = tf.random.Generator.from_seed(1)

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(
            name="calls", shape=(2,), dtype="int32", initializer="zeros", trainable=False, autocast=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls.assign_add(tf.stack([1, tf.shape(x)[0]]))
        if training:
            x = x + 0.01 * tf.random.get_global_generator().normal(tf.shape(x))
            x = x + 0.01 * keras.random.normal(tf.shape(x))
            x = x + 0.01 * self.generator.normal(tf.shape(x))
        return x


def build() -> Any:
    keras.utils.set_random_seed(3)
    x, word = keras.Input((8,)), keras.Input((), dtype="int32")
    hidden = keras.layers.concatenate([Counter()(x), keras.layers.Embedding(WORDS, 6)(word)])
    hidden = keras.layers.Dense(16)(hidden)
    hidden = keras.layers.BatchNormalization(momentum=0.8)(hidden)
    hidden = keras.layers.Dropout(0.3)(keras.layers.ReLU()(hidden))
    hidden = keras.layers.GaussianNoise(0.05)(hidden)
    hidden = hidden + keras.layers.Dense(16, dtype="bfloat16")(hidden)
    return keras.Model([x, word], keras.layers.Dense(4, dtype="float32")(hidden))


def optimizers() -> dict[str, Callable[[], Any]]:
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    return {
        "momentum": lambda: keras.optimizers.SGD(decay, momentum=0.9, weight_decay=1e-3),
        "adam": lambda: keras.optimizers.AdamW(0.01),
    }


def digest(value: Any) -> str:
    """Return a hash of arrays and plain values, however nested."""
    out = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            out.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        elif isinstance(value, dict):
            for key, each in value.items():
                out.update(str(key).encode())
                add(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            out.update(repr(value).encode())

    add(value)
    return out.hexdigest()


def rows() -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(ROWS, 8)).astype(np.float32)
    return x, generator.integers(0, WORDS, ROWS).astype(np.int32), generator.integers(0, 4, ROWS)


def arrays(variables: Any) -> list[Any]:
    return [np.array(each.numpy()) for each in variables]


def assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def train(
    virtual: int,
    optimizer: str = "momentum",
    after_step: Callable[[int], None] = lambda step: None,
    saved: dict[str, Any] | None = None,
    stop_at: int | None = None,
    epochs: int = EPOCHS,
    threads: int = 1,
) -> tuple[str, dict[str, Any]]:
    """Train, and return the hash of all values, and the values."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    hvd.init()
    model = build()
    steps = optimizers()[optimizer]()
    steps.build(model.trainable_variables)
    chance = keras.random.SeedGenerator(random.randrange(1 << 30))  # one that no model has
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    workers = hvd.elastic.virtual_workers(
        virtual, model, steps, seed=11, threads=threads, sums=["loss", "right"], metrics=[accuracy], generators=[chance]
    )
    x, word, label = rows()
    if saved is not None:
        assign(model.variables, saved["model"])
        assign(steps.variables, saved["optimizer"])
        assign(accuracy.variables, saved["metric"])
        workers.load_state_dict(saved["workers"])
    progress = dict(saved["progress"]) if saved is not None else {"step": 0, "epoch": 0, "position": 0, "log": []}
    state = hvd.elastic.KerasState(model, steps, workers=workers, accuracy=accuracy, **progress)

    def gradients(x: Any, word: Any, label: Any, count: Any) -> Any:
        with tf.GradientTape() as tape:
            out = model([x, word], training=True)
            loss = tf.reduce_sum(cross_entropy(label, out)) / count
        accuracy.update_state(label, out)
        return loss, out, tape.gradient(loss, model.trainable_variables)

    signature = [
        tf.TensorSpec([None, 8]),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([]),
    ]
    gradients = tf.function(gradients, input_signature=signature)

    def batch() -> None:
        order = Permutation(ROWS, state.epoch)[np.arange(ROWS)]
        chosen = order[state.position : state.position + BATCH]
        chosen = chosen[np.random.permutation(len(chosen))]  # drawn outside of shards
        scale = (random.random() + np.random.random() + float(tf.random.uniform([]))) * 0.01
        for shard in workers.shards(len(chosen), step=state.step):
            part = chosen[shard.rows]
            noise = np.random.normal(size=(len(part), 8)).astype(np.float32)  # an augmentation
            noise = noise + 0.01 * keras.random.normal(noise.shape, seed=chance).numpy()
            noise = noise * np.float32(random.random() * scale) + 0.01 * tf.random.normal(noise.shape).numpy()
            loss, out, found = gradients(x[part] + noise, word[part], label[part], np.float32(len(chosen)))
            shard.add_gradients(found)
            shard.add("loss", loss)
            shard.add("right", (out.numpy().argmax(1) == label[part]).sum())
        norm = tf.linalg.global_norm([tf.cast(each, tf.float32) for each in workers.gradients])
        clipped = [each * tf.cast(0.5 / tf.maximum(norm, 0.5), each.dtype) for each in workers.gradients]
        steps.apply(clipped, model.trainable_variables)
        drawn = random.random(), float(tf.random.normal([])), float(keras.random.uniform([]))
        state.log = [*state.log, workers.sums["loss"], workers.sums["right"], *drawn]
        state.step += 1
        state.position += len(chosen)

    def validate() -> float:
        for shard in workers.shards(ROWS, step=-1 - state.epoch, training=False):
            out = model([x[shard.rows], word[shard.rows]], training=False)
            shard.add("loss", tf.reduce_sum(cross_entropy(label[shard.rows], out)))
        return workers.sums["loss"]

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < epochs:
            while state.position < ROWS:
                if state.step == stop_at:
                    return
                batch()
                after_step(state.step)
                if stop_at is None:
                    state.check_host_updates()
            state.log = [*state.log, validate(), float(accuracy.result())]
            accuracy.reset_state()
            state.epoch, state.position = state.epoch + 1, 0
            state.commit()

    loop(state)
    values = {
        "model": arrays(model.variables),
        "optimizer": arrays(steps.variables),
        "metric": arrays(accuracy.variables),
        "workers": workers.state_dict(),
        "progress": {name: getattr(state, name) for name in ("step", "epoch", "position", "log")},
    }
    parts = {name: digest(value) for name, value in values.items()}
    # Keras numbers the names of layers within a process
    parts |= {f"variable {number}": digest(each.numpy()) for number, each in enumerate(model.variables)}
    return digest(parts), parts if stop_at is None else values
