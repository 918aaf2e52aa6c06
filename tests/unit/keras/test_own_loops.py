"""Loops of one's own with TensorFlow: what a lost peer leaves behind, and which errors are not one."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from tests.unit.keras.test_keras_state import CLASSES, compiled, rows, same
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver

STEPS = 8


def train(dies, how):
    """how: "tape", the gradients are reduced by a tape and applied by a plain optimizer; "optimizer": by that."""
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if how == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        if how == "tape":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
    left, entered = [], []

    @hvd.elastic.run
    def loop(state):
        # nothing of a step that failed is left, whichever of its operations TensorFlow had run by then
        # (the others take over the running means of rank 0)
        assert not left or hvd.rank() or same(left, [v.numpy() for v in model.variables])
        entered.append((state.step, int(optimizer.iterations), state.progress))
        while state.step < STEPS:
            if dies.get(link().worker) == state.step:
                die()
            step(*map(tf.constant, rows(8, seed=100 * state.step + hvd.rank())))
            state.step += 1
            left[:] = [v.numpy() for v in model.variables]
        return [float(v.numpy().astype("float64").sum()) for v in model.trainable_variables]

    weights = loop(state)
    return weights, entered, int(optimizer.iterations), state.progress


@pytest.mark.parametrize("how", ["tape", "optimizer"])
def test_a_lost_peer_leaves_no_trace_of_the_step_that_failed(how):
    with WorldDriver(start_with=3) as driver:
        driver.start(train, {2: 5}, how, count=3)
        one, other = driver.results(2)
    assert one[0] == other[0]
    for result in (one, other):
        assert result[1][1:] == [(5, 5, 5)]
        assert result[2:] == (STEPS, STEPS)


def counts_before(how, graph, rounds):
    """Counts before the step, in a number and a list, and commits every fourth time. Worker 2 dies in the sixth."""
    hvd.init()
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(CLASSES)])
    optimizer = keras.optimizers.SGD(0.1)
    if how == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer)
    trained = keras.Variable(tf.zeros(STEPS, "int32"), trainable=False)

    def step(x):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(model(x, training=True)))
        if how == "tape":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(step) if graph else step
    state = hvd.elastic.TensorFlowState([trained], model=model, optimizer=optimizer, batch=0, seen=[])

    @hvd.elastic.run
    def loop(state):
        while state.batch < STEPS:
            state.batch += 1
            state.seen.append(state.batch)
            if link().worker == 2 and state.batch == 6:
                die()
            for _ in range(rounds):
                step(tf.ones((2, 4)))
                trained.assign(tf.tensor_scatter_nd_add(trained.value, [[state.batch - 1]], [1]))
            if state.batch % 4 == 0:
                state.commit()
        return state.seen, trained.numpy().tolist()

    return loop(state)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("how", "graph"), [("tape", True), ("optimizer", True), ("tape", False), ("optimizer", False)])
def test_a_batch_that_is_counted_before_its_steps_is_trained_on_once_after_a_loss(how, graph, rounds):
    with WorldDriver(start_with=3) as driver:
        driver.start(counts_before, how, graph, rounds, count=3)
        for seen, trained in driver.results(2):
            assert seen == list(range(1, STEPS + 1))
            assert trained == [rounds] * STEPS


def commits():
    """Variables of TensorFlow's own, changed by hand: back to the commit, as with Horovod."""
    hvd.init()
    variable = tf.Variable([0.0, float(hvd.rank())])
    count = keras.Variable(0, dtype="int32", trainable=False)
    state = hvd.elastic.TensorFlowState([variable, count], step=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append((state.step, variable.numpy().tolist()))
        while state.step < 6:
            if link().worker == 2 and state.step == 5:
                die()
            variable.assign_add(hvd.allreduce(tf.ones(2), op=hvd.Average))
            count.assign(count + 1)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return variable.numpy().tolist(), int(count)

    return loop(state), entered


def test_variables_of_tensorflow_s_own_return_to_the_commit_and_newcomers_take_them_over():
    with WorldDriver(start_with=3) as driver:
        driver.start(commits, count=3)
        results = driver.results(2)
    for result, entered in results:
        assert result == ([6.0, 6.0], 6)
        assert entered == [(0, [0.0, 0.0]), (4, [4.0, 4.0])]


def test_an_error_of_the_loop_s_own_goes_through_as_it_is(alone):
    model = compiled()

    def generator():
        yield from [rows(8)] * 2
        raise ValueError("a mistake in the data")

    kinds = (tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(generator, output_signature=kinds)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.progress)
        model.fit(data, verbose=0)

    with pytest.raises(tf.errors.OpError, match="a mistake in the data"):
        loop(hvd.elastic.TensorFlowKerasState(model))
    assert entered == [0]

    @hvd.elastic.run
    def raising(state):
        entered.append("again")
        raise tf.errors.UnknownError(None, None, "connection reset by peer")  # it reads like a lost peer

    with pytest.raises(tf.errors.UnknownError):
        raising(hvd.elastic.TensorFlowKerasState(model))
    assert entered[1:] == ["again"]


def late():
    """A model that nobody has built when the loop is entered is taken over once `fit` has built it."""
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(CLASSES)])
    import spark_elastic.keras as hk

    compiled(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    state = hk.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def loop(state):
        tell("in loop")
        model.fit(*rows(32, seed=hvd.rank()), batch_size=8, verbose=0, callbacks=[hk.elastic.ElasticCallback(state)])

    loop(state)
    return [float(v.numpy().sum()) for v in model.trainable_variables]


def test_a_model_that_is_built_by_fit_is_the_same_on_all_members():
    with WorldDriver(start_with=2) as driver:
        driver.start(late, count=2)
        one, other = driver.results(2)
    assert one == other
    assert len(one) == 4


def test_the_names_of_horovod_s_package_are_the_same_objects():
    from spark_elastic.tensorflow.keras.callbacks import MetricAverageCallback
    from spark_elastic.tensorflow.keras.elastic import KerasState

    import spark_elastic.keras
    import spark_elastic.tensorflow.keras

    assert spark_elastic.tensorflow.keras is spark_elastic.keras
    assert MetricAverageCallback is spark_elastic.keras.callbacks.MetricAverageCallback
    assert KerasState is hvd.elastic.TensorFlowKerasState
    assert hvd.DistributedOptimizer is spark_elastic.keras.DistributedOptimizer


def test_a_state_of_variables_says_what_it_cannot_keep(alone):
    with pytest.raises(UsageError, match="not int"):
        hvd.elastic.TensorFlowState([3])
    with pytest.raises(UsageError, match="sessions"):
        hvd.elastic.TensorFlowState([], session=object())
