"""`model.fit` in worlds that break and grow: real processes, real kills."""

import functools

import keras
import numpy as np
import pytest

import spark_elastic.keras as hvd
from spark_elastic.collective.fused import FusedReduction
from spark_elastic.keras.elastic import ElasticCallback, ElasticDataset, KerasState
from tests.nightly import by_night
from tests.unit.keras.test_keras_state import CLASSES
from tests.unit.world_link import die, link
from tests.unit.worlds import together

ROWS, BATCH, FEATURES = 90, 9, 5
EPOCHS = 2
STEPS = ROWS // BATCH * EPOCHS


def data():
    generator = np.random.default_rng(3)
    x = generator.normal(size=(ROWS, FEATURES)).astype("float32")
    x[:, 0] = np.arange(ROWS)  # the row's own number, which `Noting` takes out again
    return x, generator.integers(0, CLASSES, ROWS)


class Noting(keras.layers.Layer):
    """Notes which rows come through, and how often it was called in training; in a graph, with the step's own ops."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(ROWS,), initializer="zeros", trainable=False, name="seen")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls", dtype="int32")

    def call(self, inputs, training=False):
        if training:
            numbers = keras.ops.cast(inputs[:, 0], "int32")
            self.seen.assign(self.seen + keras.ops.sum(keras.ops.one_hot(numbers, ROWS), axis=0))
            self.calls.assign(self.calls + 1)
        return inputs[:, 1:]


def build(seed=None, batch_norm=False):
    keras.utils.set_random_seed(hvd.rank() if seed is None else seed)
    layers = [keras.layers.Input((FEATURES,)), Noting(name="noting"), keras.layers.Dense(6)]
    layers += [keras.layers.BatchNormalization()] if batch_norm else []
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])


def compiled(model, optimizer=None, **more):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, loss, metrics=["accuracy"], **more)
    return model


class At(keras.callbacks.Callback):
    """Calls functions at steps of this process: {(epoch, batch of the epoch): function}."""

    def __init__(self, state, actions, when="begin"):
        super().__init__()
        self.state, self.actions, self.when = state, actions, when

    def on_train_batch_begin(self, batch, logs=None):
        if self.when == "begin":
            self.actions.get((self.state.epoch, self.state.batch), lambda: None)()

    def on_epoch_end(self, epoch, logs=None):
        if self.when == "epoch":
            self.actions.get((self.state.epoch, self.state.batch), lambda: None)()


class Ends(keras.callbacks.Callback):
    """What a user's callback sees."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def dies_at_reduction(number):
    """This process ends itself when it would send its gradients for the so many-th time: inside of a step's graph."""
    plain, calls = FusedReduction.__call__, []

    def reduce(self, *args):
        calls.append(1)
        if len(calls) == number:
            die()
        return plain(self, *args)

    FusedReduction.__call__ = reduce


def train(dies, where="begin", passes=1, compile_options=None):
    """Workers in `dies` kill themselves at (epoch, batch)."""
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    model = compiled(build(), optimizer, **(compile_options or {}))
    state = KerasState(model, batch=0, epoch=0)
    dataset = ElasticDataset(*data(), state=state, batch_size=BATCH)
    ends = Ends()
    mine = dies.get(link().worker)
    if where == "reduction" and mine is not None:
        dies_at_reduction(mine)
    actions = {mine: die} if where != "reduction" else {}

    @hvd.elastic.run
    def loop(state):
        average = hvd.callbacks.MetricAverageCallback()
        callbacks = [At(state, actions, where), average, ElasticCallback(state), ends]
        return model.fit(dataset, initial_epoch=state.epoch, epochs=EPOCHS, verbose=0, callbacks=callbacks)

    history = loop(state)
    noting = model.get_layer("noting")
    return {
        "size": hvd.size(),
        "progress": state.progress,
        "iterations": int(optimizer.iterations),
        "place": (state.epoch, state.batch),
        "epochs": ends.epochs,
        "calls": int(noting.calls),
        "seen": keras.ops.convert_to_numpy(noting.seen).tolist(),
        "model": [keras.ops.convert_to_numpy(v).astype("float64").sum() for v in model.trainable_variables],
        "counted": float(model.metrics[0].count),
        "hits": float(model.metrics[1].metrics[0].count),
        "history": (history.epoch, {name: len(values) for name, values in history.history.items()}),
    }


def check(results, size, steps=STEPS):
    for result in results:
        assert result["size"] == size
        assert result["progress"] == result["iterations"] == steps
        assert result["place"] == (EPOCHS, 0)
        assert result["epochs"] == list(range(EPOCHS))
        assert result["calls"] == STEPS
        assert result["history"] == (list(range(EPOCHS)), {"accuracy": EPOCHS, "loss": EPOCHS})
    for result in results[1:]:
        assert result["model"] == results[0]["model"]


def test_in_a_world_of_one_it_is_plain_training(alone):
    x, y = data()
    plain = compiled(build(seed=1), keras.optimizers.SGD(0.05, momentum=0.9))
    ours = compiled(build(seed=1))
    state = KerasState(ours, batch=0, epoch=0)
    dataset = ElasticDataset(x, y, state=state, batch_size=BATCH, shuffle=False)
    loop = hvd.elastic.run(
        lambda state: ours.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[ElasticCallback(state)])
    )
    one = loop(state)
    other = plain.fit(x, y, batch_size=BATCH, shuffle=False, epochs=EPOCHS, verbose=0)
    assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-5)
    assert one.history["accuracy"] == pytest.approx(other.history["accuracy"])
    assert not np.any(keras.ops.convert_to_numpy(ours.get_layer("noting").seen) - EPOCHS)


@functools.cache
def undisturbed(passes):
    return together(train, {}, "begin", passes)[0]


@pytest.mark.parametrize(
    ("where", "passes", "options"),
    by_night(
        [
            ("begin", 1, {}),
            ("reduction", 1, {"steps_per_execution": 4}),
            ("begin", 2, {}),
            ("begin", 1, {"run_eagerly": True}),
            ("epoch", 1, {}),
        ],
        but=[("begin", 1, {})],
    ),
)
def test_a_killed_worker_costs_no_step_and_no_row(where, passes, options):
    """Rows are noted by the layer, inside of the step: a step that failed must not have left them noted.

    At the end of an epoch the others are in the collective that averages the metrics.
    """
    at = {"begin": (0, 5), "reduction": 7, "epoch": (0, STEPS // EPOCHS)}[where]
    results = together(train, {2: at}, where, passes, options, count=3, left=2)
    check(results, 2, STEPS // passes)
    for result in results:
        assert max(result["seen"]) <= EPOCHS
        # the loss is counted before the reduction that fails and the accuracy beside it
        assert result["counted"] == result["hits"]
    assert results[0]["model"] == pytest.approx(undisturbed(passes)["model"], abs=2e-3)


@pytest.mark.nightly
def test_rank_0_may_die_and_another_after_it():
    (result,) = together(train, {1: (0, 3), 2: (1, 7)}, count=3, left=1)
    check([result], 1)
