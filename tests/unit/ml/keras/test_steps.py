"""One step: its effect, a failed one, and the number of traces."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from spark_elastic.collective.fused import FusedReduction
from spark_elastic.data.dataset import pack
from spark_elastic.errors import HorovodInternalError, InvalidSettingsError
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import (
    ROWS,
    STEPS,
    alone,
    assert_as_undisturbed,
    close,
    dense,
    in_float64,
    make_net,
    make_training,
)


def moving(**options):
    with in_float64():
        return {"model": make_net(dropout=0.4, norm=True), "optimizer": keras.optimizers.AdamW(0.02), **options}


def test_a_step_in_parts_that_fails_in_the_reduction_has_changed_nothing(data, tmp_path, monkeypatch):
    options = {"accumulation_steps": 3}
    expected = alone(make_training(data, tmp_path / "1", **moving(**options))), trainings.weights(tmp_path / "1")
    failures = iter([False] * 5 + [True, False, True, True] + [False] * STEPS)
    plain = FusedReduction.__call__

    def failing(self, *args):
        if next(failures):
            raise HorovodInternalError("a peer is gone")
        return plain(self, *args)

    monkeypatch.setattr(FusedReduction, "__call__", failing)
    result = alone(make_training(data, tmp_path / "2", **moving(**options)))
    assert_as_undisturbed(result, tmp_path / "2", expected)


def test_other_errors_of_a_step_are_not_taken_for_a_lost_peer(data, tmp_path):
    def broken(y_true, y_pred):
        tf.debugging.assert_less(tf.reduce_max(tf.abs(y_pred)), tf.constant(1e-30, y_pred.dtype), "too large")
        return tf.reduce_mean(tf.square(y_pred), -1)

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        alone(make_training(data, tmp_path, loss=broken))


def test_dropout_differs_from_step_to_step_and_is_the_same_for_the_same_seed(data, tmp_path):
    results = {}
    for name, seed in (("one", 3), ("again", 3), ("another", 4)):
        training = make_training(data, tmp_path / name, **moving(epochs=1, seed=seed, shuffle=False))
        results[name] = alone(training)["history"], trainings.weights(tmp_path / name)
    assert results["one"] == results["again"]
    assert results["one"][1] != results["another"][1]
    with in_float64():
        constant = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), dense(3, 2)])
    frozen = {"optimizer": keras.optimizers.SGD(0.0), "callbacks": [Losses(tmp_path / "losses")], "batch_size": ROWS}
    alone(make_training(data, tmp_path / "steps", model=constant, epochs=4, shuffle=False, **frozen))
    losses = (tmp_path / "losses").read_text().split()
    assert len(set(losses)) == 4, "the same rows and weights in each step, and other rows of them left out"


class Losses(keras.callbacks.Callback):
    def __init__(self, path):
        super().__init__()
        self.path = str(path)

    def on_epoch_end(self, epoch, logs=None):
        with open(self.path, "a") as file:
            file.write(f"{logs['loss']!r}\n")


def test_a_weight_of_two_is_a_row_that_comes_twice(tmp_path):
    generator = np.random.default_rng(1)
    rows = {"features_0": generator.normal(size=(12, 6)), "label_0": generator.integers(0, 3, 12)}
    twice = [0, 0, 1, 1, 1, *range(2, 12)]
    pack({**rows, "sample_weight": np.array([2.0, 3.0] + [1.0] * 10)}, tmp_path / "plain")
    pack({name: value[twice] for name, value in rows.items()}, tmp_path / "b" / "plain")
    weights = []
    for folder, reduction in ((tmp_path, "mean_with_sample_weight"), (tmp_path / "b", "sum_over_batch_size")):
        with in_float64():
            loss = trainings.cross_entropy(reduction=reduction)
        alone(make_training(folder, folder / "run", batch_size=100, shuffle=False, loss=loss))
        weights.append(trainings.weights(folder / "run"))
    assert weights[0] == close(weights[1])


def test_half_precision_trains_and_its_gradients_are_bounded_as_they_are(data, tmp_path):
    policy = "mixed_float16"

    def half():
        layers = [dense(8, 1, activation="tanh", dtype=policy), dense(3, 2, dtype="float32")]
        return keras.Sequential([keras.Input((6,)), *layers])

    def single():
        return keras.Sequential([keras.Input((6,)), dense(8, 1, activation="tanh"), dense(3, 2)])

    found = []
    for name, make in (("half", half), ("single", single)):
        optimizer = keras.optimizers.SGD(0.1)
        if name == "half":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=7)
        settings = {"model": make(), "optimizer": optimizer, "gradient_clip_norm": 0.2, "accumulation_steps": 2}
        training = make_training(data, tmp_path / name, **settings)
        from spark_elastic.ml.keras.train import train

        found.append((train(training).history["loss"], trainings.weights(tmp_path / name)))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.02)
    assert found[0][1] == pytest.approx(found[1][1], abs=0.02)
    trainings.hvd.shutdown()


@keras.saving.register_keras_serializable("test_steps")
class DenseTable(keras.layers.Layer):
    """What `Embedding` computes, with a gradient that is not sparse."""

    def build(self, shape):
        self.table = self.add_weight(shape=(7, 5), initializer=keras.initializers.RandomUniform(seed=4))

    def call(self, words):
        return keras.ops.matmul(keras.ops.one_hot(words, 7, dtype=self.dtype), self.table)


@pytest.mark.parametrize("bound", [{"gradient_clip_norm": 0.1}, {"gradient_clip_value": 0.01}], ids=str)
def test_bounds_of_sparse_gradients_are_those_of_dense_ones(bound, tmp_path):
    """Words come several times in a batch, and the entries of a row count together."""
    words = np.random.default_rng(4).integers(0, 7, (40, 4))
    pack({"features_0": words, "label_0": words.max(1) % 3}, tmp_path / "plain")
    found = []
    for name in ("sparse", "dense"):
        with in_float64():
            initial = keras.initializers.RandomUniform(seed=4)
            table = keras.layers.Embedding(7, 5, embeddings_initializer=initial) if name == "sparse" else DenseTable()
            net = keras.Sequential([keras.Input((4,), dtype="int64"), table, keras.layers.Flatten(), dense(3, 2)])
        alone(make_training(tmp_path, tmp_path / name, model=net, batch_size=8, epochs=2, **bound))
        found.append(trainings.weights(tmp_path / name))
    assert found[0] == close(found[1])


# --- train_steps of one's own -------------------------------------------------------------------------


class TwoApplies(keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        for _ in range(2):
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class NoApply(keras.Sequential):
    def train_step(self, data):
        return {"loss": self.compute_loss(y=data[1], y_pred=self(data[0], training=True))}


class Conditional(keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)
            return 0

        tf.cond(loss < 1e9, apply, lambda: 0)
        return {"loss": loss}


class Clips(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        for variable in self.trainable_variables:
            variable.assign(keras.ops.clip(variable, -1.0, 1.0))
        return logs


class TwoOptimizers(keras.Sequential):
    def compile(self, *args, **settings):
        super().compile(*args, **settings)
        self.other = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients[:2], self.trainable_variables[:2])
        self.other.apply(gradients[2:], self.trainable_variables[2:])
        return {"loss": loss}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_net(kind=Clips), "^train_step changes .*kernel.* by an assign"),
        (lambda: make_net(kind=TwoOptimizers), "^train_step changes .* by another optimizer"),
        (lambda: make_net(kind=TwoApplies), "calls 2 times optimizer.apply"),
        (lambda: make_net(kind=NoApply), "does not call optimizer.apply"),
        (lambda: make_net(kind=Conditional), "inside of a condition"),
    ],
)
def test_a_train_step_that_cannot_be_reduced_once_is_refused(make, said, data, tmp_path):
    with in_float64():
        net = make()
    with pytest.raises(InvalidSettingsError, match=said):
        alone(make_training(data, tmp_path, model=net))
