"""Loops with virtual workers in Keras: the same bits in worlds of any size, through kills, arrivals and a resume."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from tests.unit.keras.exact_bugs import BUGS, train_with_each
from tests.unit.keras.exact_loops import train
from tests.unit.ml.in_worlds import kill_and_add
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver

KINDS: tuple[tuple[int, str], ...] = ((4, "momentum"), (3, "adam"))


def train_kinds() -> list[Any]:
    return [train(*kind, after_step=lambda step: tell("step", step)) for kind in KINDS]


def in_world(size: int, function: Any, *args: Any) -> list[Any]:
    """What each worker of a world returns. TensorFlow's threads are those of a process, so also one is a new one."""
    with WorldDriver(start_with=size) as driver:
        driver.start(function, *args, count=size)
        return driver.results(size)


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    (results,) = in_world(1, train_kinds)
    return results


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_number_of_workers_changes_no_bit(size, alone):
    assert in_world(size, train_kinds) == [alone] * size
    assert alone[0][0] != alone[1][0]


def reuses_memory(kind: str) -> list[Any]:
    """The gradients of a loop whose accumulator is one object, for two variables, all shards and all calls."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    model = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(2, use_bias=False) for _ in range(2))])
    workers = hvd.elastic.virtual_workers(4, model, keras.optimizers.SGD(0.1))
    made = np.zeros((2, 2), np.float32)
    variable = tf.Variable(made)

    def fill(value: float) -> None:
        made.fill(value)
        variable.assign(made)

    given = variable if kind == "variable" else made
    for shard in workers.shards(4, 0):
        fill(shard.index + 1.0)
        for _ in range(1 + shard.index % 2):
            shard.add_gradients([given, given])
        variable.assign_add(tf.ones((2, 2)))
        fill(-1.0)
    return [each.numpy().tolist() for each in workers.gradients]


@pytest.mark.parametrize("kind", ["variable", "array"])
@pytest.mark.parametrize("size", [2])
def test_a_loop_may_write_to_gradients_that_it_has_given(size, kind):
    assert in_world(size, reuses_memory, kind) == [[[[1.0 + 2 * 2 + 3 + 2 * 4] * 2] * 2] * 2] * size


# --- kills, arrivals and a resume ---------------------------------------------------------------------


def slow_kind(seed: int) -> dict[str, Any]:
    return {"virtual": [2, 4, 5][seed % 3], "optimizer": ["momentum", "adam"][seed % 2], "epochs": 4}


def train_slowly(seed: int) -> Any:
    def after_step(step: int) -> None:
        tell("step", step)
        time.sleep(0.1)  # newcomers, which trace their first step, find others at work

    return train(**slow_kind(seed), after_step=after_step)


def train_undisturbed(seed: int) -> Any:
    return train(**slow_kind(seed), after_step=lambda step: tell("step", step))


def storm(seed: int, expected: dict[int, Any]) -> int:
    """Train through one schedule; return the number of worlds."""
    if seed % 6 not in expected:
        (expected[seed % 6],) = in_world(1, train_undisturbed, seed)
    with WorldDriver(start_with=3) as driver:
        driver.start(train_slowly, seed, count=3)
        kill_and_add(driver, random.Random(seed), lambda: driver.start(train_slowly, seed))
        for result in driver.results(1):
            assert result == expected[seed % 6], f"schedule {seed}"
        return len(driver.worlds)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_kills_and_arrivals_change_no_bit(seed):
    storm(seed, {})


@pytest.mark.soak
def test_a_hundred_schedules_of_kills_and_arrivals_change_no_bit():
    """SOAK_SEED: the first schedule; SOAK_SCHEDULES: their number."""
    expected: dict[int, Any] = {}
    first = int(os.environ.get("SOAK_SEED", "100"))
    for seed in range(first, first + int(os.environ.get("SOAK_SCHEDULES", "100"))):
        storm(seed, expected)
        print(f"schedule {seed} ok", flush=True)


def stopped() -> Any:
    return train(*KINDS[0], stop_at=7)[1]


def resumed(saved: Any) -> Any:
    return train(*KINDS[0], saved=saved)


@pytest.mark.soak
def test_a_resume_with_another_number_of_workers_changes_no_bit(alone):
    saved, _ = in_world(2, stopped)
    assert in_world(3, resumed, saved) == [alone[0]] * 3


@pytest.fixture(scope="module")
def undisturbed_epoch() -> str:
    (result,) = in_world(1, train_undisturbed_epoch)
    return result


@pytest.mark.soak
@pytest.mark.parametrize("bugs", [BUGS[0::3], BUGS[1::3], BUGS[2::3]], ids=["first", "second", "third"])
def test_planted_bugs_are_noticed(bugs, undisturbed_epoch):
    expected = undisturbed_epoch
    everyones = in_world(3, train_with_each, 5, bugs)
    for (what, *_), *hashes in zip(everyones[0], *(([each for _, each in one]) for one in everyones), strict=True):
        if what:
            assert hashes != [expected] * 3, f"not noticed: {what}"
        else:
            assert hashes == [expected] * 3


def train_undisturbed_epoch() -> str:
    return train(5, epochs=1)[0]


# --- what is refused, and what is not exact -------------------------------------------------------------


@keras.saving.register_keras_serializable("test_virtual_workers")
class Remembers(keras.layers.Layer):
    """Keeps a value of its last rows."""

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.seen.assign(keras.ops.mean(x))
        return x


def message_of(function: Any) -> str:
    try:
        function()
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def refused() -> dict[str, str]:
    import tensorflow as tf

    import spark_elastic.keras as hvd

    hvd.init()

    def made(*layers: Any, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        optimizer = optimizer or keras.optimizers.SGD(0.1)
        return model, hvd.elastic.virtual_workers(2, model, optimizer, **options)

    def a_pass(model: Any, workers: Any, also: Any = lambda x: x) -> None:
        x = tf.reshape(tf.range(24.0), (8, 3))
        for shard in workers.shards(8, step=0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(also(x[shard.rows]), training=True))
            shard.add_gradients(tape.gradient(loss, model.trainable_variables))

    found = {"threads": message_of(made)}
    found["count"] = message_of(lambda: hvd.elastic.virtual_workers(0, None, None))
    sgd = keras.optimizers.SGD(0.1)
    found["not built"] = message_of(
        lambda: hvd.elastic.virtual_workers(2, keras.Sequential([keras.layers.Dense(1)]), sgd, threads=2)
    )
    found["optimizer"] = message_of(lambda: made(optimizer=hvd.DistributedOptimizer(sgd), threads=2))
    found["norm"] = message_of(lambda: made(hvd.SyncBatchNormalization(), threads=2))
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(3))
    found["spectral"] = message_of(lambda: made(spectral, threads=2))
    model, workers = made(threads=2, sums=["loss"])
    found["too early"] = message_of(lambda: workers.gradients)
    found["no gradients"] = message_of(lambda: list(workers.shards(8, 0)))
    found["number"] = message_of(lambda: next(workers.shards(8, 0)).add_gradients([None]))
    found["sum"] = message_of(lambda: next(workers.shards(8, 0)).add("los", 1.0))
    a_pass(model, workers)
    f1 = keras.metrics.F1Score()
    model_of_f1, workers_of_f1 = made(threads=2, metrics=[f1])

    def count(x: Any) -> Any:
        f1.update_state(tf.ones((len(x), 2)), tf.ones((len(x), 2)))
        return x

    found["late metric"] = message_of(lambda: a_pass(model_of_f1, workers_of_f1, count))
    f1.reset_state()
    found["metric"] = message_of(lambda: a_pass(model_of_f1, workers_of_f1, count))
    found["fine"] = message_of(lambda: workers.gradients)
    found["no rule"] = message_of(lambda: a_pass(*made(Remembers(), threads=2)))
    other, _ = made(keras.layers.BatchNormalization(), threads=2)
    found["other model"] = message_of(lambda: a_pass(model, workers, lambda x: x + 0.0 * other(x, training=True)))
    return found


def test_what_cannot_be_exact_is_refused():
    (found,) = in_world(1, refused_with_two_threads)
    assert found.pop("fine") == found.pop("metric") == "nothing was refused"
    for name, said in {
        "threads": "TensorFlow runs already in this process, with 2",
        "count": "at least 1, not 0",
        "not built": "need a built Keras model",
        "optimizer": "not a DistributedOptimizer",
        "norm": "synchronised batch normalisation",
        "spectral": "SpectralNormalization",
        "too early": "no gradients of a whole batch",
        "no gradients": "shard 0 of the batch was given no gradients",
        "number": "got 1 gradients for the 2 trainable variables",
        "sum": "'los' is not one of the sums",
        "late metric": "the metric f1_score has made its variables in a shard",
        "no rule": "different values in the variable",
        "other model": "not one of the model of these virtual workers",
    }.items():
        assert said in found.pop(name), name
    assert not found


def refused_with_two_threads() -> dict[str, str]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(2)
    return refused()


def test_keras_on_another_backend_is_refused(monkeypatch):
    from spark_elastic.keras import elastic

    monkeypatch.setattr(elastic, "BACKEND", "torch")
    with pytest.raises(UsageError, match="need Keras on TensorFlow, and Keras runs on torch"):
        elastic.virtual_workers(2, None, None)
