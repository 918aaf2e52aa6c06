"""The Keras models of `exact.py`, on TensorFlow: a step with a reduction, and a step by virtual workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

import spark_elastic.tensorflow as hvd

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def build(sizes: Sequence[int]) -> Any:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(size, activation="relu") for size in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *hidden, keras.layers.Dense(sizes[-1])])


def rows_of(sizes: Sequence[int], rows: int) -> tuple[Any, Any]:
    generator = tf.random.Generator.from_seed(1)
    return generator.normal((rows, sizes[0])), generator.uniform((rows,), 0, sizes[-1], tf.int64)


def trajectory(sizes: Sequence[int], rows: int, size: int) -> Callable[[int], None]:
    model, optimizer = build(sizes), keras.optimizers.SGD(0.01, momentum=0.9)
    share = slice(hvd.rank() * rows // size, (hvd.rank() + 1) * rows // size)
    x, y = (each[share] for each in rows_of(sizes, rows))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(y, model(x, training=True)) / rows
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def run(steps: int) -> None:
        for _ in range(steps):
            float(step(x, y))

    return run


def exact(sizes: Sequence[int], rows: int, shards: int) -> Callable[[int], None]:
    model, optimizer = build(sizes), keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    x, y = rows_of(sizes, rows)
    workers = hvd.elastic.virtual_workers(shards, model, optimizer, sums=["loss"])

    @tf.function(reduce_retracing=True)
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(y, model(x, training=True)) / rows
        return loss, tape.gradient(loss, model.trainable_variables)

    update = tf.function(lambda found: optimizer.apply(found, model.trainable_variables))

    def run(steps: int) -> None:
        for step in range(steps):
            for shard in workers.shards(rows, step):
                loss, found = gradients(x[shard.rows], y[shard.rows])
                shard.add_gradients(found)
                shard.add("loss", loss)
            update(workers.gradients)

    return run
