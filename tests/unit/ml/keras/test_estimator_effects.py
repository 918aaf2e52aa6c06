"""Settings of the Keras estimator alone, and what each of them changes; see `both/test_estimators.py`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.data.dataset import Dataset
from tests.unit.ml.keras.estimators import estimator, make_net, settings, weights_of
from tests.unit.ml.keras.test_pickling import Own


@pytest.fixture(scope="module")
def plain(dataset: Dataset) -> Any:
    return estimator().from_dataset_path(dataset)


def test_a_compiled_model_is_trained_as_it_was_compiled_and_is_not_changed(dataset: Dataset, plain: Any) -> None:
    net = make_net()
    net.compile(keras.optimizers.SGD(0.1), settings()["loss"], metrics=["accuracy"])
    before = net.get_weights()
    model = estimator(model=net, optimizer=None, loss=None).from_dataset_path(dataset)
    assert weights_of(model) == weights_of(plain)
    assert set(model.history.names) >= {"accuracy", "val_accuracy"}
    assert all(np.array_equal(a, b) for a, b in zip(before, net.get_weights(), strict=True))
    assert net.compiled
    assert not net.optimizer.iterations.numpy()


def test_metrics_are_columns_of_the_history(dataset: Dataset) -> None:
    def ones(label: Any, output: Any) -> Any:
        return keras.ops.ones_like(label)

    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")
    model = estimator(metrics=[ones, "accuracy"], weighted_metrics=[top]).from_dataset_path(dataset)
    assert model.history["ones"] == model.history["val_ones"] == [1.0, 1.0]
    assert 0 < model.history["accuracy"][0] < model.history["accuracy"][1] <= 1
    assert len([name for name in model.history.names if name.startswith("val_")]) == 4


def test_custom_objects_say_what_the_names_of_the_configuration_stand_for(dataset: Dataset) -> None:
    net = keras.Sequential([keras.Input((6,)), Own(2.0), keras.layers.Dense(3)])
    model = estimator(model=net, custom_objects={"Own": Own}, epochs=1).from_dataset_path(dataset)
    assert isinstance(model.keras_model.layers[0], Own)


def test_accumulation_and_compression_change_nothing_in_a_world_of_one(dataset: Dataset, plain: Any) -> None:
    import spark_elastic.keras as hvd

    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))  # which is unwrapped
    made = estimator(optimizer=distributed, accumulation_steps=4, gradient_compression="bf16")
    assert np.allclose(weights_of(made.from_dataset_path(dataset)), weights_of(plain), atol=1e-5)
    assert (made.training.gradient_compression, made.training.accumulation_steps) == ("bf16", 4)


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None) -> Any:
        return 2 * super().call(inputs, training)


@pytest.mark.parametrize("wanted", [True, False])
def test_sync_batch_norm_leaves_ordinary_layers_and_names_others(
    wanted: bool, dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    layers = keras.layers
    norms = [layers.BatchNormalization(name="norm"), Scaled(name="own")]
    net = keras.Sequential([keras.Input((6,)), layers.Dense(4), *norms, layers.Dense(3)])
    made = estimator(model=net, epochs=1, sync_batch_norm=wanted)
    model = made.from_dataset_path(dataset)
    assert made.training.sync_batch_norm == wanted
    assert [type(each) for each in model.keras_model.layers] == [type(each) for each in net.layers]
    said = [record.getMessage() for record in caplog.records if "batch statistics" in record.getMessage()]
    assert len(said) == wanted
    assert all("own (Scaled)" in each for each in said)
