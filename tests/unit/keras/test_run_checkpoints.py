"""The values of Keras' and TensorFlow's states in a checkpoint."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.keras as hvd
from spark_elastic.elastic.run_checkpoints import restored, values_of
from spark_elastic.keras.callback_state import same
from spark_elastic.runs.tensors import detached, from_bytes, to_bytes
from spark_elastic.tensorflow.elastic import TensorFlowState

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def built(is_built: bool = True) -> tuple[Any, Any]:
    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers] if is_built else layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    return model, hvd.elastic.KerasState(model, batch=0, epoch=0)


def in_a_file(state: Any) -> Any:
    return restored(from_bytes(to_bytes(detached(values_of(state), "state"))))


@pytest.mark.parametrize("is_built", [True, False])
def test_a_keras_state_takes_all_values_of_another_from_a_file(is_built: bool) -> None:
    hvd.init()
    model, state = built()
    stopping = keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)
    callbacks = [stopping, hvd.elastic.ElasticCallback(state)]
    model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    values = in_a_file(state)
    other_model, other = built(is_built)
    other._set_values(values)
    assert other.epoch == 1
    kept, taken = state.fit_callbacks.state_dict().values, other.fit_callbacks.state_dict().values
    assert kept
    assert same(kept, taken)
    for each in (model, other_model):
        each.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    for one, two in zip(model.get_weights(), other_model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    hvd.shutdown()


def test_a_tensorflow_state_takes_all_values_of_another_from_a_file() -> None:
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)]
    other = [tf.Variable([0.0, 0.0]), tf.Variable(0, dtype=tf.int64)]
    taken = TensorFlowState(other, step=0)
    taken._set_values(in_a_file(TensorFlowState(variables, step=7)))
    assert taken.step == 7
    assert [each.numpy().tolist() for each in other] == [[1.0, 2.0], 3]
