"""The user's Keras model, the workers' and the one that `fit` returns are the same: policies, flags, weights."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.errors import InvalidSettingsError, NotPicklableError
from spark_elastic.keras.elastic.handlers import ModelHandler
from spark_elastic.ml.keras.fidelity import differences
from spark_elastic.ml.keras.pickling import KerasPickle
from tests.unit.ml.keras.estimators import HereEstimator, estimator


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    generator = np.random.default_rng(7)
    rows = {name: generator.normal(size=(32, 6)).astype(np.float32) for name in ("features_0", "label_0")}
    return pack(rows, tmp_path_factory.mktemp("set"))


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    as_in_a_new_process()


def as_in_a_new_process() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.config.set_epsilon(1e-7)


class Inner(keras.layers.Layer):
    """A layer whose own layer gets the global policy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(6, kernel_initializer=keras.initializers.GlorotUniform(seed=3))

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x)


def made_under(policy: str, build: bool = True) -> Any:
    keras.config.set_dtype_policy(policy)
    inputs = [keras.Input((6,))] if build else []
    model = keras.Sequential([*inputs, Inner(), keras.layers.Activation("linear", dtype="float32")])
    keras.config.set_dtype_policy("float32")
    return model


def faint(label: Any, output: Any) -> Any:
    """A loss with gradients that float16 rounds to zero."""
    return keras.ops.mean((output - label) ** 2, -1) * 1e-7


@pytest.mark.parametrize("build", [True, False], ids=["built", "not built"])
def test_model_of_mixed_precision_learns_from_small_gradients(build: bool, dataset: Dataset) -> None:
    changes = {"batch_size": 16, "epochs": 1, "shuffle": False, "loss": faint}
    model = made_under("mixed_float16", build)
    fitted = estimator(model=model, optimizer=keras.optimizers.SGD(1e7), **changes).from_dataset_path(dataset)
    assert fitted.keras_model.dtype_policy.name == "mixed_float16"
    plain = made_under("mixed_float16")
    before = plain.get_weights()[0]
    plain.compile(optimizer=keras.optimizers.SGD(1e7), loss=faint, jit_compile=False)
    with dataset.reader("train", batch_size=16, shuffle=False) as reader:
        for batch in reader.epoch(0):
            plain.train_on_batch(batch.tensors["features_0"], batch.tensors["label_0"])
    after = plain.get_weights()[0]
    assert np.abs(after - before).max() > 0.1
    if build:  # otherwise the weights begin with other values
        assert not differences(plain, fitted.keras_model)
        np.testing.assert_allclose(fitted.keras_model.get_weights()[0], after, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("policy", ["mixed_float16", "float64"])
def test_layers_within_layers_keep_their_policy_and_flags(policy: str) -> None:
    model = made_under(policy)
    model.layers[0].dense.bias.trainable = False
    loaded = KerasPickle.of(model).load()
    assert not differences(model, loaded)
    assert loaded.layers[0].dense.dtype_policy.name == policy
    assert [each.path.rpartition("/")[2] for each in loaded.trainable_variables] == ["kernel"]


class Called(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_build_of_a_model_that_was_loaded_can_be_sent_to_others() -> None:
    model = Called()
    model(np.zeros((1, 2), "float32"))
    loaded = KerasPickle.of(model).load()
    assert pickle.loads(pickle.dumps(ModelHandler(loaded).metadata())) == {"input_shape": [1, 2]}


def test_built_layer_within_a_function_keeps_its_weights() -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    layer.bias.assign([5.0, 7.0])
    loaded = KerasPickle.of([layer, lambda x: layer(x)]).load()
    assert loaded[1](np.zeros((1, 3))).numpy().tolist() == [[5.0, 7.0]]


class Elsewhere(HereEstimator):
    def run_job(self, *arguments: Any) -> Any:
        as_in_a_new_process()
        return super().run_job(*arguments)


def test_workers_have_the_global_settings_of_the_driver(dataset: Dataset) -> None:
    model = made_under("float32")
    keras.config.set_epsilon(0.25)
    keras.config.set_floatx("float64")
    settings = {"optimizer": "sgd", "loss": "mse", "batch_size": 16, "num_proc": 1, "verbose": 0}
    given = estimator(model=model, **settings)
    here = Elsewhere(model=model, **settings, run_options=given.getOrDefault("run_options"))
    here.from_dataset_path(dataset)
    assert (keras.config.epsilon(), keras.config.floatx()) == (0.25, "float64")


class Changed(Inner):
    """A layer that its configuration makes with another number of weights."""

    def add_scale(self) -> None:
        self._tracker.unlock()
        self.scale = self.add_weight(name="scale", shape=(6,))
        self._tracker.lock()

    def load_own_variables(self, store: Any) -> None: ...


def test_weights_that_the_configuration_does_not_make_are_refused(dataset: Dataset) -> None:
    layer = Changed()
    model = keras.Sequential([keras.Input((6,)), layer])
    layer.add_scale()
    with pytest.raises(InvalidSettingsError, match="layers and variables here"):
        estimator(model=model, loss="mse").from_dataset_path(dataset)


def made_by(seed: int = 3, **options: Any) -> Any:
    initial = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(6, kernel_initializer=initial, bias_initializer="ones", **options)


def decayed() -> Any:
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def used(model: Any) -> Any:
    """Return an optimizer that has done a step of the model."""
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9)
    optimizer.build(model.trainable_variables)
    optimizer.apply([value * 0.1 for value in model.trainable_variables])
    return optimizer


def with_adapters() -> Any:
    model = keras.Sequential([keras.Input((6,)), made_by()])
    initial = keras.initializers.GlorotUniform(seed=5)
    model.layers[0].enable_lora(2, lora_alpha=7, a_initializer=initial, b_initializer=initial)
    return model


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (lambda: keras.Sequential([keras.Input((6,)), made_by()]), lambda _: decayed()),
        (lambda: keras.Sequential([keras.Input((6,)), made_by()]), used),
        (with_adapters, lambda _: keras.optimizers.SGD(0.1)),
    ],
    ids=["weights that are not decayed", "an optimizer that was used", "LoRA"],
)
def test_what_a_configuration_leaves_out_is_trained_as_by_plain_keras(make: Any, optimizer: Any, dataset: Dataset):
    model, plain = make(), make()
    settings = {"batch_size": 16, "epochs": 2, "shuffle": False, "loss": "mse"}
    fitted = estimator(model=model, optimizer=optimizer(model), **settings).from_dataset_path(dataset)
    plain.compile(optimizer=optimizer(plain), loss="mse", jit_compile=False)
    for epoch in range(2):
        with dataset.reader("train", batch_size=16, shuffle=False) as reader:
            for batch in reader.epoch(epoch):
                plain.train_on_batch(batch.tensors["features_0"], batch.tensors["label_0"])
    for found, wanted in zip(fitted.keras_model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


class Scaled(keras.layers.Layer):
    def __init__(self, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, x: Any) -> Any:
        return x * self.scale


class Forgetful(keras.regularizers.Regularizer):
    def __init__(self, factor: float = 0.0) -> None:
        self.factor = factor

    def __call__(self, weight: Any) -> Any:
        return self.factor * keras.ops.sum(keras.ops.abs(weight))

    def get_config(self) -> dict[str, Any]:
        return {}


class Lossy(keras.layers.Dense):
    def load_own_variables(self, store: Any) -> None: ...


def changed_layer() -> Any:
    layer = Scaled(3.0)
    layer.scale = 0.5
    return layer


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (changed_layer, r"scale=0\.5.* here, .*scale=3\.0"),
        (lambda: made_by(kernel_regularizer=Forgetful(0.1)), r"kernel_regularizer\.factor=0\.1.* factor=0\.0"),
        (lambda: Lossy(6), "the values of .*kernel"),
    ],
    ids=["changed after it was made", "a part that forgets", "a layer that loads nothing"],
)
def test_layer_that_arrives_changed_is_refused(layer: Any, said: str, dataset: Dataset) -> None:
    model = keras.Sequential([keras.Input((6,)), layer()])
    with pytest.raises(InvalidSettingsError, match=said.replace(" factor", ".*factor")):
        estimator(model=model, loss="mse").from_dataset_path(dataset)


def test_optimizer_that_names_variables_of_this_process_is_refused(dataset: Dataset) -> None:
    model, optimizer = keras.Sequential([keras.Input((6,)), made_by()]), keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=model.trainable_variables)
    with pytest.raises(NotPicklableError, match="give var_names"):
        estimator(model=model, optimizer=optimizer, loss="mse").from_dataset_path(dataset)
    counting = keras.optimizers.SGD(0.1)
    counting.iterations.assign(5)
    with pytest.raises(InvalidSettingsError, match="counts 5 iterations"):
        estimator(model=model, optimizer=counting, loss="mse").from_dataset_path(dataset)
