"""SyncBatchNormalization: the division of rows among ranks changes neither outputs nor gradients."""

from itertools import accumulate

import keras
import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.keras as hvd
import spark_elastic.tensorflow as hvd_of_tensorflow
from spark_elastic.keras.sync_batch_normalization import convert, unconverted
from tests.nightly import by_night
from tests.unit.worlds import together

ROWS = 8


def build(sync=True, conv=True):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(4, 3) if conv else layers.Dense(4),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(6),
            layers.BatchNormalization(scale=False),
            layers.Dense(3),
        ]
    )
    if sync:
        convert(model)
    return model


def rows():
    generator = np.random.default_rng(2)
    x = (generator.normal(size=(ROWS, 5, 5, 2)) * 3 + 5).astype("float32")
    return x, np.arange(ROWS) % 3


def in_worker(cases):
    """Return the gradients of each case, eagerly and in a graph."""
    hvd.init()
    return [[gradients(*case, graph) for graph in (False, True)] for case in cases]


def gradients(counts, sync, conv, graph):
    """Return gradients of the mean loss over all rows, and running statistics; `counts`: the rows of each rank."""
    model = build(sync, conv)
    x, y = rows()
    edges, rank = [0, *accumulate(counts)], hvd.rank() if hvd.is_initialized() else 0
    mine = slice(edges[rank], edges[rank + 1])

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / ROWS
        if len(counts) > 1:
            tape = hvd_of_tensorflow.DistributedGradientTape(tape, op=hvd.Sum)
        return tape.gradient(loss, model.trainable_variables)

    run = tf.function(step) if graph else step
    found = run(tf.constant(x[mine]), tf.constant(y[mine]))
    return [each.numpy().tolist() for each in found], [each.numpy().tolist() for each in model.non_trainable_variables]


def distance(found, expected):
    one, other = (np.concatenate([np.ravel(each) for each in nested]) for nested in (found, expected))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.fixture(scope="module")
def of_one_process():
    """Results of one process, with and without a convolution; TensorFlow cannot convolve 0 rows."""
    return {conv: gradients([ROWS], False, conv, False) for conv in (True, False)}


CASES = {
    1: [([8], True, True)],
    2: [([4, 4], True, True), ([7, 1], True, True), ([8, 0], True, False), ([4, 4], False, True)],
    4: [([2, 2, 2, 2], True, True), ([3, 1, 0, 4], True, False)],
}


@pytest.mark.parametrize("size", by_night(CASES, but=[2]))
def test_gradients_are_those_of_one_process_with_the_same_rows(size, of_one_process):
    cases = CASES[size]
    results = together(in_worker, cases, count=size)
    for rank, of_cases in enumerate(results):
        for (counts, sync, conv), both_ways in zip(cases, of_cases, strict=True):
            expected, buffers = of_one_process[conv]
            for found, running in both_ways:
                off = distance(found, expected)
                print(f"{counts}, {'synchronised' if sync else 'each its own'}, rank {rank}: off by {off:.1e}")
                assert (off < 3e-6) == sync
                assert (distance(running, buffers) < 3e-6) == sync


def with_a_mask():
    hvd.init()
    x = np.arange(24, dtype="float32").reshape(4, 3, 2)
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)
    layer = hvd.SyncBatchNormalization(momentum=0.5)
    layer.build(x.shape)
    mine = slice(hvd.rank(), None, 2)
    layer(x[mine], mask=mask[mine], training=True)
    kept = x[mask]
    return [
        np.abs(layer.moving_mean.numpy() - 0.5 * kept.mean(0)).max(),
        np.abs(layer.moving_variance.numpy() - 0.5 - 0.5 * kept.var(0)).max(),
    ]


@pytest.mark.nightly
def test_masked_rows_do_not_count():
    for errors in together(with_a_mask):
        assert max(errors) < 1e-4


@keras.saving.register_keras_serializable("tests")
class OwnCall(keras.layers.BatchNormalization):
    def call(self, inputs, training=None):
        return super().call(inputs, training) * 2


def test_conversion_keeps_weights_and_names_what_it_cannot_convert():
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(name="norm"), OwnCall(name="own")])
    config, weights = model.get_config(), model.weights
    plain = model(np.ones((2, 3)), training=False)
    convert(model)
    assert isinstance(model.layers[0], hvd.SyncBatchNormalization)
    assert unconverted(model) == ["own (OwnCall)"]
    assert all(one is other for one, other in zip(model.weights, weights, strict=True))
    assert model.layers[0].get_config() == config["layers"][1]["config"]
    assert np.allclose(model(np.ones((2, 3)), training=False), plain)


def test_saved_model_with_synchronised_layers_loads(tmp_path):
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(momentum=0.7)])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.layers[0]) is hvd.SyncBatchNormalization
    assert again.layers[0].momentum == 0.7
    assert hvd_of_tensorflow.SyncBatchNormalization is hvd.SyncBatchNormalization
