"""Loops of one's own with TensorFlow: what a lost peer leaves behind, and which errors are not one."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from tests.nightly import by_night
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


@pytest.mark.parametrize("how", by_night(["tape", "optimizer"], but=["tape"]))
def test_a_lost_peer_leaves_no_trace_of_the_step_that_failed(how):
    one, other = together(train, {2: 5}, how, count=3, left=2)
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "graph", "rounds"), [("tape", True, 1), ("optimizer", True, 2), ("tape", False, 2), ("optimizer", False, 1)]
)
def test_a_batch_that_is_counted_before_its_steps_is_trained_on_once(how, graph, rounds):
    for seen, trained in together(counts_before, how, graph, rounds, count=3, left=2):
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


def counter_of_batches(size=STEPS, optimizer=None):
    """A model whose weights count how often each batch was trained on, its optimizer, and a step on one batch."""
    hvd.init()
    model = keras.Sequential([keras.layers.Input((size,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign(tf.zeros((size, 1)))
    optimizer = optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    return model, optimizer, step_on(model, optimizer)


def step_on(model, optimizer, graph=False, reduces=False):
    def step(batch):
        with tf.GradientTape() as tape:
            value = -tf.reduce_sum(model(tf.one_hot([batch], model.input_shape[1])))
        if reduces:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return tf.function(step) if graph else step


def trained(model):
    return model.trainable_variables[0].numpy().reshape(-1).tolist()


def beside_another_optimizer(other):
    """Two rounds of steps on a batch. other: an optimizer that never steps, or the second of two, further on."""
    model, optimizer, step = counter_of_batches()
    if other == "idle":
        model.compile()
        state = hvd.elastic.TensorFlowKerasState(model, trains=optimizer, batch=0)
        steps, counts = [step], [model]
    else:
        second, its_own, its_step = counter_of_batches()
        for _ in range(5):
            its_step(0)
        second.set_weights([0 * weight for weight in second.get_weights()])
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, second=second, its_own=its_own, batch=0)
        steps, counts = [step, its_step], [model, second]

    @hvd.elastic.run
    def loop(state):
        while state.batch < STEPS:
            for turn in range(2):
                if link().worker == 2 and state.batch == 5 and turn == 1:
                    die()
                for each in steps:
                    each(tf.constant(state.batch))
            state.batch += 1
            if state.batch % 4 == 0:
                state.commit()
        return [trained(each) for each in counts]

    return loop(state)


@pytest.mark.nightly
@pytest.mark.parametrize("other", ["idle", "further on"])
def test_rounds_of_steps_are_recognised_beside_an_optimizer_with_another_count(other):
    for result in together(beside_another_optimizer, other, count=3, left=2):
        assert all(counts == [2.0] * STEPS for counts in result)


def second_optimizer_dies_first():
    """A plain optimizer has its first step after one that reduces; worker 2 dies in between."""
    model, optimizer, step = counter_of_batches()
    second, plain, _ = counter_of_batches(optimizer=keras.optimizers.SGD(1.0))
    its_step = step_on(second, plain, reduces=True)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, second=second, plain=plain, batch=0)

    @hvd.elastic.run
    def loop(state):
        while state.batch < STEPS:
            step(tf.constant(state.batch))
            if link().worker == 2:
                die()
            its_step(tf.constant(state.batch))
            state.batch += 1
        return trained(model), trained(second)

    return loop(state)


@pytest.mark.nightly
def test_the_first_step_of_a_second_optimizer_that_fails_undoes_that_of_the_first():
    for result in together(second_optimizer_dies_first, count=3, left=2):
        assert result == ([1.0] * STEPS, [1.0] * STEPS)


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


def fits_and_steps(dies, before, in_fit):
    """Four batches by `fit`, then four by steps of its own, three times."""
    import spark_elastic.keras as hk

    model, optimizer, _ = counter_of_batches(24)
    step = step_on(model, optimizer, graph=True)
    model.compile(optimizer, loss=lambda wanted, given: -keras.ops.mean(given))
    rows = tf.eye(24)
    state = hk.elastic.KerasState(model, batch=0, epoch=0, own=0, seen=[])
    entered = []

    class Dies(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if in_fit and link().worker == 2 and 4 * state.epoch + state.batch == dies:
                die()

    @hk.elastic.run
    def loop(state):
        entered.append(4 * state.epoch + state.batch + state.own)
        while state.epoch < 3:
            if state.own == 4 * state.epoch:
                begin, end = 4 * state.epoch + state.batch, 4 * state.epoch + 4
                data = tf.data.Dataset.from_tensor_slices((rows[begin:end], tf.zeros((end - begin, 1)))).batch(1)
                callbacks = [hk.elastic.ElasticCallback(state), Dies()]
                model.fit(data, epochs=state.epoch + 1, initial_epoch=state.epoch, verbose=0, callbacks=callbacks)
            while state.own < 4 * state.epoch:
                own = state.own
                if before:
                    state.own += 1
                    state.seen.append(own)
                if not in_fit and link().worker == 2 and own == dies:
                    die()
                step(tf.constant(12 + own))
                if not before:
                    state.own += 1
                    state.seen.append(own)
                state.check_host_updates()
        return trained(model), state.seen

    return loop(state), entered


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dies", "before", "in_fit", "at"),
    by_night([(5, False, False, 13), (5, True, False, 13), (6, True, True, 10)], but=[(6, True, True, 10)]),
)
def test_steps_between_two_calls_of_fit_are_followed_like_a_users_own_loop(dies, before, in_fit, at):
    for result, entered in together(fits_and_steps, dies, before, in_fit, count=3, left=2):
        assert result == ([1.0] * 24, list(range(12)))
        assert entered == [0, at]


def restores_before_a_commit(how, graph, dies):
    """Its optimizer is built by the first step, so the commit at the loop's entry has no slots of it."""
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    if how == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0, dynamic_growth_steps=3)
    elif how == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer)
    model, _, _ = counter_of_batches(optimizer=optimizer)
    step = step_on(model, optimizer, graph, reduces=how != "optimizer")
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.batch)
        while state.batch < STEPS:
            if dies and link().worker == 2 and state.batch == 5:
                die()
            hvd.allreduce(tf.ones(1))
            step(tf.constant(state.batch))
            state.batch += 1
        return sorted(float(tf.reduce_sum(v.value)) for v in [*model.variables, *optimizer.variables])

    return loop(state), entered


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "graph"), [("tape", True), ("optimizer", False), ("scaled", True)])
def test_an_optimizer_that_was_built_after_the_commit_returns_to_it_as_well(how, graph):
    results = []
    for dies in (False, True):
        results.append(together(restores_before_a_commit, how, graph, dies, count=3, left=2))
    assert [entered for _, entered in results[1]] == [[0, 0]] * 2
    assert results[1][0][0] == results[1][1][0] == pytest.approx(results[0][0][0])


def changes_running_values():
    """A variable of the model that is not trained is changed after the step, and a check follows."""
    model, optimizer, step = counter_of_batches()
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    other = keras.Sequential([keras.layers.Input((1,)), norm])
    running = other.non_trainable_variables[0]
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, other=other, batch=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.batch)
        while state.batch < STEPS:
            if link().worker == 2 and state.batch == 5:
                die()
            step(tf.constant(state.batch))
            running.assign_add([1.0])
            state.batch += 1
            state.check_host_updates()
        return trained(model), running.numpy().tolist(), entered

    return loop(state)


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


@pytest.mark.nightly
def test_changes_after_the_step_survive_a_check():
    assert together(changes_running_values, count=3, left=2) == [([1.0] * STEPS, [float(STEPS)], [0, 5])] * 2


def with_running_means(reduces, graph, distributed):
    """Return a model that its first step builds, an optimizer, and a step on the batch of a number."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        if reduces:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(step) if graph else step
    return model, optimizer, lambda number: step(*map(tf.constant, rows(8, seed=100 * number)))


def loses_two_in_a_row(how, graph):
    """All members train the same rows. Worker 3 dies before the first step, and worker 2 when that is done again."""
    hvd.init()
    model, optimizer, step = with_running_means(how == "tape", graph, how == "optimizer")
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.step)
        while state.step < STEPS:
            if link().worker == 4 - len(entered) and state.step == 0 and link().worker > 1:
                die()
            step(state.step)
            state.step += 1
            state.check_host_updates()
        return [v.numpy().tolist() for v in model.variables], entered

    return loop(state)


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "graph"), [("optimizer", False), ("tape", True)])
def test_a_step_that_builds_the_model_and_fails_twice_leaves_no_running_means(how, graph):
    ((variables, entered),) = together(loses_two_in_a_row, how, graph, count=3, left=1)
    assert entered == [0, 0, 0]
    plain, _, step = with_running_means(False, False, False)
    for number in range(STEPS):
        step(number)
    for own, wanted in zip(variables, plain.variables, strict=True):
        assert tf.reshape(own, [-1]).numpy().tolist() == pytest.approx(tf.reshape(wanted.value, [-1]).numpy(), abs=1e-4)
