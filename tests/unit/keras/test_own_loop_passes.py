"""Passes of a step in own loops, when a worker joins between two of them."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from tests.integration.processes import wait_until
from tests.unit.keras.test_own_loops import counter_of_batches, trained
from tests.unit.world_link import link, tell
from tests.unit.worlds import WorldDriver

pytestmark = pytest.mark.nightly


def joins_with_passes(size, warm_up, at):
    """Two passes a step, and a commit after each. Two members wait before the pass `at` until a third comes."""
    plain = keras.optimizers.SGD(1.0)
    model, optimizer, step = counter_of_batches(
        size, hvd.DistributedOptimizer(plain, backward_passes_per_step=2, average_aggregated_gradients=False)
    )
    for _ in range(warm_up):
        step(tf.constant(0))
    model.layers[0].kernel.assign(tf.zeros((size, 1)))
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append(state.batch)
        while state.batch < size:
            if state.batch == 4:
                tell("trains", True)
            if state.batch == at and hvd.size() == 2:
                wait_until(link().updates_seen, 60, "the driver announces a newcomer")
            step(tf.constant(state.batch))
            state.batch += 1
            state.commit()
        return trained(model), hvd.size(), entered[-1] % 2

    return loop(state)


@pytest.mark.parametrize(("warm_up", "at"), [(0, 7), (1, 7), (1, 8)])
def test_each_pass_counts_once_when_a_worker_joins_between_two(warm_up, at):
    size = 16
    with WorldDriver(start_with=2) as driver:
        driver.start(joins_with_passes, size, warm_up, at, count=2)
        driver.wait(lambda: driver.told("trains"))
        driver.start(joins_with_passes, size, warm_up, at)
        assert driver.results(3) == [([1.0] * size, 3, 0)] * 3
