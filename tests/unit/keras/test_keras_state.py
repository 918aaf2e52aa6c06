"""KerasState: what it copies, puts back and takes over."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import spark_elastic.keras as hvd
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.keras.elastic import KerasState
from tests.nightly import by_night
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver, together

CLASSES = 3


def build_model(features=4, dtype=None, width=6):
    return keras.Sequential(
        [
            keras.layers.Input((features,)),
            keras.layers.Dense(width, dtype=dtype),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(CLASSES),
        ]
    )


def compiled(model=None, optimizer="adam", **more):
    model = model or build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **more)
    return model


def rows(count, features=4, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, features)).astype("float32"), generator.integers(0, CLASSES, count)


def numbers(*owners):
    return [np.asarray(keras.ops.convert_to_numpy(v)).astype("float64").sum() for o in owners for v in o.variables]


def everything(*owners):
    return [keras.ops.convert_to_numpy(v).copy() for o in owners for v in o.variables]


def same(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_restore_returns_models_optimizers_metrics_and_values_to_the_last_commit(alone):
    model = compiled()
    other = keras.optimizers.SGD(0.1, momentum=0.9)
    mean = keras.metrics.Mean()
    state = KerasState(model, other=other, mean=mean, seed=keras.random.SeedGenerator(3), n=0)
    model.fit(*rows(32), batch_size=8, verbose=0)
    mean.update_state(3.0)
    state.n = 1
    state.commit()
    want = everything(model, model.optimizer, mean)
    counting = [float(v) for v in model.metrics_variables]
    model.fit(*rows(32), batch_size=8, verbose=0)
    mean.update_state(7.0)
    state.n = 2
    assert not same(want, everything(model, model.optimizer, mean))
    state.restore()
    assert same(want, everything(model, model.optimizer, mean))
    assert counting == [float(v) for v in model.metrics_variables]
    assert state.n == 1
    assert int(model.optimizer.iterations) == 4


def test_fit_without_callbacks_of_the_package_returns_to_the_commit(alone):
    model = compiled()
    state = KerasState(model)
    before = everything(model, model.optimizer)
    seen = []

    @hvd.elastic.run
    def loop(state):
        seen.append((state.progress, same(before, everything(model, model.optimizer))))
        model.fit(*rows(48), batch_size=8, verbose=0, callbacks=[callback])
        return state.progress

    class FailsOnce(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and len(seen) == 1:
                raise HorovodInternalError("a peer is gone")

    callback = FailsOnce()
    assert loop(state) == 6
    assert seen == [(0, True), (0, True)]


def test_an_optimizer_that_comes_with_compile_is_kept_too(alone):
    model = build_model()
    state = KerasState(model, n=1)
    compiled(model)
    assert state.optimizer is None
    state.sync()
    assert state.optimizer is model.optimizer
    model.fit(*rows(16), batch_size=8, verbose=0)
    state.restore()
    assert all(not np.any(v) for v in everything(model.optimizer)[2:]), "its slots, although it had not stepped"
    assert int(model.optimizer.iterations) == 0


@pytest.mark.nightly
def test_a_state_takes_up_that_of_an_earlier_call_of_the_loop(alone):
    def build(value):
        model = compiled()
        mean = keras.metrics.Mean()
        return model, mean, KerasState(model, mean=mean, seed=keras.random.SeedGenerator(3), n=value)

    model, mean, kept = build(1)

    @hvd.elastic.run
    def loop(state):
        model.fit(*rows(32), batch_size=8, verbose=0)

    loop(kept)
    mean.update_state(3.0)
    kept.save()
    want = everything(model, model.optimizer, mean)
    model.fit(*rows(32), batch_size=8, verbose=0)  # what comes after the loop
    kept.n = 2
    other, other_mean, state = build(0)
    state._copy_from(kept)
    assert same(want, everything(other, other.optimizer, other_mean))
    assert (state.n, state.version) == (1, kept.version)
    state.model.fit(*rows(32), batch_size=8, verbose=0)
    state.restore()
    assert same(want, everything(other, other.optimizer, other_mean))


# --- taking over ----------------------------------------------------------------------------------


def synchronised(dtype):
    hvd.init()
    r = hvd.rank()
    keras.utils.set_random_seed(r)
    model = compiled(build_model(dtype=dtype))
    generator = keras.random.SeedGenerator(5 + r)
    flag = keras.Variable(np.array([True, bool(r), False]), dtype="bool", trainable=False)
    half = keras.Variable(np.full((2, 3), r + 0.5), dtype="float16", trainable=False)
    brief = keras.Variable(np.full((3,), r + 0.25), dtype="bfloat16", trainable=False)
    if r == 1:  # the other has never stepped
        model.fit(*rows(24), batch_size=8, verbose=0)
        keras.random.normal((2,), seed=generator)
        model.optimizer.learning_rate = 0.5
    state = KerasState(model, generator=generator, flag=flag, half=half, brief=brief, history=[r])
    state._root = 1
    state.sync()
    owners = [model, model.optimizer]
    singles = [keras.ops.convert_to_numpy(v).astype("float32").tolist() for v in (flag, half, brief, generator.state)]
    return (
        numbers(*owners),
        singles,
        state.history,
        int(model.optimizer.iterations),
        float(model.optimizer.learning_rate),
    )


@pytest.mark.parametrize("dtype", by_night([None, "mixed_bfloat16"], but=[None]))
def test_a_sync_takes_over_everything_from_its_root(dtype):
    first, second = together(synchronised, dtype)
    assert first == second
    assert first[2:] == ([1], 3, 0.5)
    assert first[1][:3] == [[1, 1, 0], [[1.5] * 3] * 2, [1.25] * 3]


class Plain(keras.Model):
    """Knows its variables only when it has seen its input."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(5)
        self.last = keras.layers.Dense(CLASSES)

    def call(self, inputs):
        return self.last(self.first(inputs))


def unbuilt():
    hvd.init()
    for _ in range(hvd.rank()):
        build_model()  # its layers take numbers that the others' layers have here
    model = compiled(Plain())
    extra = keras.optimizers.Adam()
    if hvd.rank() == 0:
        model.fit(*rows(24), batch_size=8, verbose=0)
        extra.build(model.last.trainable_variables)
        extra.apply([keras.ops.ones_like(v) for v in model.last.trainable_variables])
    state = KerasState(model, extra=extra)
    state.sync()
    return numbers(model, model.optimizer, extra), int(model.optimizer.iterations), model.optimizer.built


@pytest.mark.nightly
def test_a_newcomer_whose_model_and_optimizers_are_not_built_takes_them_over():
    first, second = together(unbuilt)
    assert first == second
    assert len(first[0]) > 10
    assert first[1:] == (3, True)


def different_models():
    hvd.init()
    state = KerasState(compiled(build_model(width=6 + hvd.rank())))
    try:
        state.sync()
    except UsageError as error:
        return str(error)
    return "root"


@pytest.mark.nightly
def test_a_model_that_differs_from_the_roots_is_named():
    (answer,) = together(different_models, left=1)  # the root waits; its driver ends it when a function has raised
    assert "/kernel is (4, 6) float32 there, and (4, 7) float32" in answer


def fits_in_a_reset_callback():
    """As Horovod's Keras example: a batch before the loop, and one each time the world has changed."""
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = compiled(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.fit(*rows(8), steps_per_epoch=1, verbose=0)
    state = KerasState(model, batch=0, epoch=0)
    resets, entries = [], []

    def on_reset():
        resets.append((hvd.size(), state.progress))
        model.fit(*rows(8, seed=hvd.rank()), steps_per_epoch=1, verbose=0)

    state.register_reset_callbacks([on_reset])

    class Epochs(keras.callbacks.Callback):
        left = 2

        def on_epoch_end(self, epoch, logs=None):
            tell("epoch", epoch)
            self.left -= hvd.size() == 3
            self.model.stop_training = not self.left

    @hvd.elastic.run
    def loop(state):
        entries.append((hvd.size(), state.progress))
        callbacks = [Epochs(), hvd.elastic.ElasticCallback(state)]
        model.fit(*rows(48), batch_size=8, initial_epoch=state.epoch, epochs=10_000, verbose=0, callbacks=callbacks)

    loop(state)
    trained = [float(keras.ops.sum(v)) for v in (*model.trainable_variables, *model.optimizer.variables)]
    return resets, entries, hvd.allgather_object((state.epoch, state.progress, trained))


@pytest.mark.nightly
def test_fit_in_a_reset_callback_waits_for_nobody_and_its_step_is_not_counted():
    with WorldDriver(start_with=2) as driver:
        driver.start(fits_in_a_reset_callback, count=2)
        driver.wait(lambda: driver.told("epoch"))
        driver.start(fits_in_a_reset_callback)
        results = driver.results(3)
    assert [len(resets) for resets, _, _ in results] == [1, 1, 0]
    for resets, entries, gathered in results:
        assert entries[-1:] == results[0][0], "the step was counted"
        assert resets in ([], entries[-1:])
        assert gathered == [gathered[0]] * 3
