"""Keras objects reach another process with the user's classes and functions, and import nothing early."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.errors import NotPicklableError
from spark_elastic.ml.keras import safe_objects, serialization
from spark_elastic.ml.keras.pickling import KerasPickle
from spark_elastic.ml.keras.serialization import comparable_config

ROOT = Path(__file__).parents[4]


class Own(keras.layers.Layer):
    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return self.factor * x


class OwnModel(keras.Model):
    """A model without get_config, which Keras would copy with width=1."""

    def __init__(self, width: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(width)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Told(OwnModel):
    def __init__(self, width: int = 1, **kwargs: Any) -> None:
        super().__init__(width, **kwargs)
        self.width = width

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


class OwnMetric(keras.metrics.Mean):
    def __init__(self, factor: float, name: str = "own") -> None:
        super().__init__(name=name)


def relu(x: Any) -> Any:
    """Negate; the name is that of another function of Keras."""
    return -x


def negative(x: Any) -> Any:
    return -x


def net(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), *layers])


@pytest.mark.parametrize(
    "layer",
    [Own(3.0), keras.layers.Dense(2, activation=negative), keras.layers.Lambda(lambda x: x + 1)],
    ids=["class", "function", "lambda"],
)
def test_users_classes_and_functions_are_pickled_without_registration(layer: Any) -> None:
    model = net(layer)
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    assert np.array_equal(KerasPickle.of(model).load()(x), model(x))


def test_a_function_that_keras_would_take_for_its_own_is_refused() -> None:
    with pytest.raises(NotPicklableError, match="relu has the name of one of Keras's"):
        KerasPickle.of(net(keras.layers.Dense(2, activation=relu)))


class Unusual(keras.Model):
    def __init__(this, **options: Any) -> None:
        super().__init__(**options)
        this.dense = keras.layers.Dense(2)

    def call(this, x: Any) -> Any:
        return this.dense(x)


def test_users_model_class_needs_a_complete_config() -> None:
    unusual = Unusual()
    unusual(np.zeros((1, 3)))
    assert KerasPickle.of(unusual).load().dense.units == 2
    told = Told(5)
    told(np.zeros((1, 3)))
    assert KerasPickle.of(told).load().dense.units == 5
    forgetful = OwnModel(5)
    forgetful(np.zeros((1, 3)))
    for value in (forgetful, OwnMetric(2.0)):
        with pytest.raises(pickle.PicklingError, match=r"get_config\(\) leaves out arguments of Own.*__init__"):
            KerasPickle.of(value)


def of_module(x: Any) -> Any:
    return np.pi * x


@pytest.mark.parametrize("kind", [keras.layers.Lambda, keras.metrics.MeanMetricWrapper])
def test_lambda_keeps_no_names_of_its_module_and_a_function_does(kind: Any) -> None:
    assert np.allclose(KerasPickle.of(keras.layers.Lambda(of_module)).load()(np.ones(2)), np.pi)
    with pytest.raises(NotPicklableError, match=r"a lambda in [a-z_0-9]+ uses np, .* give a function with a name"):
        KerasPickle.of(kind(lambda x, y=None: np.pi * x))


MAKES = """
import sys, pickle, keras
from spark_elastic.ml.keras.pickling import KerasPickle

@keras.saving.register_keras_serializable()
class Mine(keras.layers.Layer):
    def call(self, x):
        return 2 * x

model = keras.Sequential([keras.Input((3,)), Mine()])
sys.stdout.buffer.write(pickle.dumps(KerasPickle.of(model)))
"""
OPENS = """
import sys, pickle
sealed = pickle.loads(sys.stdin.buffer.read())
assert not {"keras", "tensorflow"} & set(sys.modules)
import numpy
print(sealed.load()(numpy.ones((1, 3))).numpy().tolist())
"""


@pytest.mark.nightly
def test_classes_of_main_reach_another_process_and_load_imports_keras() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", MAKES], env=env, capture_output=True, check=True).stdout
    opened = subprocess.run([sys.executable, "-c", OPENS], env=env, input=made, capture_output=True, check=True).stdout
    assert opened.decode().strip() == "[[2.0, 2.0, 2.0]]"


def test_archives_stay_in_memory(tmp_path, monkeypatch):
    # a worker that is killed while it loads the model removes no file
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    (tmp_path / "model.keras").write_text("of somebody else")
    monkeypatch.chdir(tmp_path)
    archive = serialization.model_to_archive(model)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    loaded = serialization.model_from_archive(archive)
    assert all((a == b).all() for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True))
    assert [each.name for each in tmp_path.iterdir()] == ["model.keras"]
    assert (tmp_path / "model.keras").read_text() == "of somebody else"


# --- arguments that a configuration of Keras leaves out -----------------------------------------------


WITH_ARGUMENTS = [
    (keras.losses.Huber, {"delta": 2.5}),
    (keras.losses.CosineSimilarity, {"axis": 1}),
    (keras.losses.SparseCategoricalCrossentropy, {"axis": 1, "from_logits": True, "ignore_class": 3}),
    (keras.losses.CategoricalCrossentropy, {"label_smoothing": 0.1}),
    (keras.metrics.CosineSimilarity, {"axis": 1}),
    (keras.metrics.SparseTopKCategoricalAccuracy, {"k": 3}),
]


@pytest.mark.parametrize(("kind", "arguments"), WITH_ARGUMENTS)
def test_arguments_survive_saving_without_trust_and_pickling(kind, arguments):
    made = kind(**arguments)
    file = safe_objects.dumps({"loss": [made]})
    assert file is not None
    for loaded in (safe_objects.loads(file)["loss"][0], KerasPickle.of(made).load()):
        assert type(loaded) is kind
        for name, value in arguments.items():
            assert loaded._fn_kwargs[name] == value
    assert comparable_config(made) == comparable_config(kind(**arguments)) != comparable_config(kind())


LOSSES = [
    kind
    for _, kind in sorted(vars(keras.losses).items())
    if isinstance(kind, type) and issubclass(kind, keras.losses.Loss) and kind is not keras.losses.Loss
]


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", LOSSES)
def test_type_of_a_loss_survives_saving_without_trust_and_pickling(kind, dtype):
    made = kind(dtype=dtype)
    assert made.dtype != kind().dtype
    file = safe_objects.dumps(made)
    assert file is not None
    for loaded in (safe_objects.loads(file), KerasPickle.of(made).load()):
        assert type(loaded) is kind
        assert loaded.dtype == made.dtype
    assert comparable_config(made) != comparable_config(kind())


def test_an_argument_may_be_an_array():
    made = keras.losses.CategoricalFocalCrossentropy(alpha=np.array([0.2, 0.3, 0.5]), axis=1)
    file = safe_objects.dumps(made)
    assert file is not None
    loaded = safe_objects.loads(file)
    assert loaded.axis == 1
    np.testing.assert_array_equal(loaded.alpha, made.alpha)
    assert comparable_config(made) is not None
