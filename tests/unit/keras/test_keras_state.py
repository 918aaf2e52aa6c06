"""KerasState: what it copies, puts back and takes over."""

import pickle

import keras
import numpy as np
import pytest

import spark_elastic.keras as hvd
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.keras.elastic import KerasState
from spark_elastic.keras.elastic.handlers import ModelHandler
from tests.nightly import by_night
from tests.unit.worlds import together

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


def test_the_build_of_a_model_that_was_loaded_can_be_sent():
    model = Plain()
    model.build_from_config({"input_shape": [1, 2]})
    model(np.zeros((1, 2), "float32"))
    sent = pickle.loads(pickle.dumps(ModelHandler(model).metadata()))
    assert sent == model.get_build_config()


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
