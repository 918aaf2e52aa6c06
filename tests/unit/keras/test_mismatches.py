"""Workers that would train models of their own get an error that names a variable and the remedy."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.keras as hk
import spark_elastic.tensorflow as hvd
from spark_elastic.errors import UsageError
from tests.nightly import by_night
from tests.unit.worlds import together


def built(seed, late=False):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(2), keras.layers.Dense(1, name="last")]
    return keras.Sequential(layers if late else [keras.layers.Input((3,)), *layers])


def stepping(model, optimizer, tape=False, graph=False):
    """Return a function that makes a step on rows of this rank."""

    def step():
        with tf.GradientTape() as recorded:
            loss = tf.reduce_mean(tf.square(model(tf.ones((2, 3)) * (1.0 + hvd.rank())) - 1.0))
        recorded = hvd.DistributedGradientTape(recorded) if tape else recorded
        gradients = recorded.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return tf.function(step) if graph else step


def ends(function):
    """Return "equal", or the line of the error that says what differs."""
    try:
        function()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "other values" in line]
        return lines[0] if lines else repr(error)
    return "equal"


DIFFERS = r"sequential\w*/dense\w*/kernel has other values"
ROWS = np.ones((6, 3), "float32"), np.ones((6, 1), "float32")


def different_models(how):
    """Each rank builds its own model."""
    hvd.init()
    model = built(seed=hvd.rank())
    reducing = "tape" not in how
    optimizer = hvd.DistributedOptimizer("sgd") if reducing else keras.optimizers.SGD()
    if "fit" in how:
        model.compile(optimizer, "mse")
        callbacks = [hk.callbacks.BroadcastGlobalVariablesCallback(0)] if "broadcast" in how else []
        return ends(lambda: model.fit(*ROWS, batch_size=2, callbacks=callbacks, verbose=0))
    if "set" in how:
        model = built(seed=hvd.rank() == 2)
        members = hvd.add_process_set([0, 1])
        optimizer = hvd.DistributedOptimizer("sgd", process_set=members)
        if hvd.rank() == 2:
            return "equal"
    if "join" in how:
        model = built(seed=hvd.rank() == 2)
        if hvd.rank() == 2:
            hvd.join()
            return "equal"
    step = stepping(model, optimizer, tape=not reducing, graph="graph" in how)

    def train():
        step()
        if "broadcast" in how:
            hvd.broadcast_variables(model.variables, root_rank=0)
        step()
        step()
        if "join" in how:
            hvd.join()

    return ends(train)


def several(function, *cases):
    return {how: function(how) for how in cases}


def test_models_that_differ_before_the_second_step_are_an_error_with_a_remedy():
    hows = ["graph", "eager tape", "graph broadcast", "eager tape broadcast", "fit", "fit broadcast"]
    for results in together(several, different_models, *hows):
        for how, result in results.items():
            if "broadcast" in how:
                assert result == "equal", how
                continue
            assert re.search(DIFFERS, result), how
            assert "hvd.broadcast_variables(model.variables, root_rank=0)" in result, how


@pytest.mark.nightly
def test_models_are_compared_within_the_set_and_not_with_ranks_that_have_joined():
    for results in together(several, different_models, "eager set", "graph join", count=3):
        assert set(results.values()) == {"equal"}


def drifting(how):
    """The state gives all ranks one model, and nothing averages what they train."""
    hvd.init()
    late = how == "built late"
    model = built(seed=hvd.rank() * late, late=late)
    optimizer = hvd.DistributedOptimizer("sgd") if late else keras.optimizers.SGD(0.1)
    if how == "fit":
        model.compile(optimizer, "mse")
    kept = {} if how == "outside" else {"optimizer": optimizer}
    state = hk.elastic.KerasState(model, batch=0, epoch=0, **kept)
    step = stepping(model, optimizer, tape=how == "tape")

    @hk.elastic.run
    def loop(state):
        while state.batch < 3:
            state.check_host_updates()
            if how == "fit":
                rows = tf.data.Dataset.from_tensor_slices(ROWS).batch(2).map(lambda x, y: (x * (1.0 + hvd.rank()), y))
                model.fit(rows, callbacks=[hk.elastic.ElasticCallback(state)], verbose=0)
                return
            step()
            state.batch += 1
        assert len({values.numpy().tobytes() for values in hvd.allgather(model.get_weights()[0][None])}) == 1

    return ends(lambda: loop(state))


@pytest.mark.parametrize("how", by_night(["inside", "outside", "fit", "tape", "built late"], but=["fit"]))
def test_replicas_that_drift_apart_are_noticed_at_the_first_mark(how):
    for result in together(drifting, how):
        if how in ("tape", "built late"):
            assert result == "equal"
            continue
        assert re.search(DIFFERS, result)
        assert "hvd.DistributedOptimizer" in result


@pytest.mark.parametrize("graph", [False, True])
def test_an_optimizer_that_trains_outside_of_the_state_is_refused(alone, graph):
    model, second = built(0), built(1)
    optimizer, other = hvd.DistributedOptimizer("adam"), hvd.DistributedOptimizer("adam")
    optimizer.build(model.trainable_variables)
    other.build(second.trainable_variables)
    steps = [stepping(model, optimizer, graph=graph), stepping(second, other, graph=graph)]

    def train(state):
        for step in steps:
            step()
        state.commit()

    for given in ({}, {"optimizer": optimizer}, {"other": other}):
        for state in (
            hvd.elastic.TensorFlowKerasState(model, second=second, batch=0, **given),
            hvd.elastic.TensorFlowState([*model.variables, *second.variables], batch=0, **given),
        ):
            with pytest.raises(UsageError, match=rf"\(Adam\) trains in the loop.*{type(state).__name__}\(model=model"):
                hvd.elastic.run(train)(state)
    both = {"optimizer": optimizer, "other": other}
    hvd.elastic.run(train)(hvd.elastic.TensorFlowKerasState(model, second=second, batch=0, **both))
    everything = [v for each in (model, second, optimizer, other) for v in each.variables]
    hvd.elastic.run(train)(hvd.elastic.TensorFlowState(everything, batch=0))
