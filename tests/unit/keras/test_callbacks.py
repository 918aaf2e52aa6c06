"""Horovod's callbacks, in a world of two."""

import keras
import pytest

import spark_elastic.keras as hvd
from spark_elastic.errors import UsageError
from tests.unit.keras.test_keras_state import CLASSES, build_model, compiled, rows
from tests.unit.worlds import together

RATE = 0.4


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen, self.momenta = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(round(float(self.model.optimizer.learning_rate), 6))
        self.momenta.append(round(self.model.optimizer.momentum, 6))


def everything():
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    sgd = keras.optimizers.SGD(RATE, momentum=0.5)
    model = compiled(keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(CLASSES)]), sgd)
    rates = Rates()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(1),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(RATE, lambda epoch: 0.1 ** (epoch - 1), start_epoch=2),
        rates,
    ]
    model.optimizer.learning_rate = RATE * (1 + hvd.rank())
    history = model.fit(*rows(32, seed=7), batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    weights = [float(v.numpy().sum()) for v in model.weights]
    own = model.evaluate(*rows(64, seed=hvd.rank()), verbose=0, return_dict=True)
    return weights, rates.seen, rates.momenta, history.history, own["loss"]


def test_broadcast_warm_up_schedule_and_metric_averages_agree_on_all_members():
    one, other = together(everything)
    assert one[0] == other[0]
    # two steps an epoch, up to the full rate in two epochs; then a tenth of it with each epoch
    ramp = [round(RATE * (0.5 + 0.125 * step), 6) for step in (1, 2, 3, 4)]
    assert one[1] == other[1] == [*ramp, 0.04, 0.04, 0.004, 0.004]
    assert set(one[2]) == {0.5}  # a step that is compiled has the momentum that it was compiled with
    assert one[3] == other[3]
    assert one[3]["lr"] == pytest.approx([ramp[1], ramp[3], 0.04, 0.004])


def averages():
    hvd.init()
    logs = {"loss": float(hvd.rank()), "note": "text"}
    if hvd.rank() == 0:
        logs["val_loss"] = 5.0
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    return logs


def test_metric_of_one_member_is_not_averaged():
    assert together(averages) == [{"loss": 0.5, "note": "text", "val_loss": 5.0}, {"loss": 0.5, "note": "text"}]


def test_momentum_is_scaled_during_the_step_after_a_change_of_the_rate_in_eager_mode(alone):
    model = compiled(build_model(), keras.optimizers.SGD(RATE, momentum=0.5), run_eagerly=True)
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(RATE, lambda epoch: 0.5**epoch)
    model.fit(*rows(32), batch_size=16, epochs=2, verbose=0, callbacks=[schedule, rates])
    assert rates.seen == [RATE, RATE, RATE / 2, RATE / 2]
    assert rates.momenta == [0.5, 0.5, 0.25, 0.5]


def test_constant_multiplier_applies_from_start_epoch_until_end_epoch(alone):
    model = compiled(build_model(), keras.optimizers.SGD(RATE))
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.5, start_epoch=1, end_epoch=2)
    model.fit(*rows(16), batch_size=16, epochs=3, verbose=0, callbacks=[schedule, rates])
    assert rates.seen == [RATE, RATE / 2, RATE / 2]


def test_rate_that_changes_within_epochs_needs_steps_per_epoch(alone):
    callback = hvd.callbacks.LearningRateScheduleCallback(RATE, lambda epoch: epoch, staircase=False)
    callback.set_params({"steps": None})
    with pytest.raises(UsageError, match="steps_per_epoch"):
        callback.on_train_begin()


def test_schedule_resumes_in_the_middle_of_an_epoch(alone):
    model = compiled(build_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    data = hvd.elastic.ElasticDataset(*rows(48), state=state, batch_size=8)
    seen = []

    class Interrupted(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((state.epoch, state.batch))
            if len(seen) == 4:
                raise hvd.HostsUpdatedInterrupt

    class Places(hvd.callbacks.LearningRateScheduleCallback):
        def __init__(self):
            super().__init__(1.0, lambda epoch: asked.append(round(epoch * 6)) or 1.0, staircase=False)

    asked = []

    @hvd.elastic.run
    def loop(state):
        callbacks = [Places(), hvd.elastic.ElasticCallback(state), Interrupted()]
        model.fit(data, initial_epoch=state.epoch, epochs=2, verbose=0, callbacks=callbacks)

    loop(state)
    assert asked == list(range(12))
    assert len(seen) == 12
