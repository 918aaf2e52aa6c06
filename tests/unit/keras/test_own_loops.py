"""Loops of one's own with TensorFlow: what a lost peer leaves behind, and which errors are not one."""

import keras
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from tests.unit.keras.test_keras_state import CLASSES, compiled, rows, same
from tests.unit.world_link import die, link
from tests.unit.worlds import together

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
            state.check_host_updates()
            left[:] = [v.numpy() for v in model.variables]
        return [float(v.numpy().astype("float64").sum()) for v in model.trainable_variables]

    weights = loop(state)
    return weights, entered, int(optimizer.iterations), state.progress


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["tape", "optimizer"])
def test_a_lost_peer_leaves_no_trace_of_the_step_that_failed(how):
    one, other = together(train, {2: 5}, how, count=3, left=2)
    assert one[0] == other[0]
    for result in (one, other):
        assert result[1][1:] == [(5, 5, 5)]
        assert result[2:] == (STEPS, STEPS)


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


@pytest.mark.nightly
def test_plain_tensorflow_variables_return_to_the_commit():
    results = together(commits, count=3, left=2)
    for result, entered in results:
        assert result == ([6.0, 6.0], 6)
        assert entered == [(0, [0.0, 0.0]), (4, [4.0, 4.0])]


def test_other_errors_leave_the_loop_unchanged(alone):
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


def test_a_tensorflow_state_refuses_other_values_than_variables(alone):
    with pytest.raises(UsageError, match="not int"):
        hvd.elastic.TensorFlowState([3])
    with pytest.raises(UsageError, match="sessions"):
        hvd.elastic.TensorFlowState([], session=object())


def counter_of_batches():
    """A model whose weights count how often each batch was trained on, its optimizer, and a step on one batch."""
    hvd.init()
    model = keras.Sequential([keras.layers.Input((STEPS,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign(tf.zeros((STEPS, 1)))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def step(batch):
        with tf.GradientTape() as tape:
            value = -tf.reduce_sum(model(tf.one_hot([batch], STEPS)))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return model, optimizer, step


def trained(model):
    return model.trainable_variables[0].numpy().reshape(-1).tolist()


def counts_by_its_optimizer():
    model, optimizer, step = counter_of_batches()
    state = hvd.elastic.TensorFlowState(model.trainable_variables, trains=optimizer)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(int(optimizer.iterations))
        while optimizer.iterations < STEPS:
            if link().worker == 2 and optimizer.iterations == 5:
                die()
            step(tf.constant(int(optimizer.iterations)))
            state.check_host_updates()
        return trained(model)

    return loop(state), entered


@pytest.mark.nightly
def test_a_state_without_plain_values_resumes_at_its_mark():
    assert together(counts_by_its_optimizer, count=3, left=2) == [([1.0] * STEPS, [0, 5])] * 2


def follows_a_target():
    """A target network is moved before each step, and each step is marked; worker 2 dies."""
    model, optimizer, step = counter_of_batches()
    target, _, _ = counter_of_batches()
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, target=target, batch=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.batch)
        while state.batch < STEPS:
            kernel = target.trainable_variables[0]
            kernel.assign(kernel + 1.0)
            if link().worker == 2 and state.batch == 5:
                die()
            step(tf.constant(state.batch))
            state.batch += 1
            if state.batch == 4:
                state.commit()
            else:
                state.check_host_updates()
        return trained(model), trained(target), entered

    return loop(state)


@pytest.mark.nightly
def test_variables_that_no_optimizer_trains_return_to_the_commit():
    assert together(follows_a_target, count=3, left=2) == [([1.0] * STEPS, [float(STEPS)] * STEPS, [0, 4])] * 2
