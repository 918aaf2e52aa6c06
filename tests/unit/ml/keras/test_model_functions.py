"""Models that a function makes: of classes that Keras cannot save, the training of plain Keras in one process."""

from __future__ import annotations

import pickle
import random
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
import torch

from spark_elastic import ElasticKerasEstimator, load_module
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError, NotPicklableError
from spark_elastic.ml.callbacks import BestCheckpoint
from spark_elastic.ml.keras.model import ElasticKerasModel
from spark_elastic.wire.pickling import dumps
from tests.nightly import by_night
from tests.unit.ml.keras.estimators import HereEstimator, estimator, make_net, settings, weights_of

layers = keras.layers


def dense(units: int, seed: int, **options: Any) -> Any:
    return layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


def unbuilt(shapes: Any) -> Any:
    return keras.Sequential([dense(shapes[0][1] + 2, 1, activation="tanh"), dense(3, 2)])


def compiled() -> Any:
    made = keras.Sequential([keras.Input((6,)), dense(8, 1, activation="tanh"), dense(3, 2)])
    made.compile(keras.optimizers.SGD(0.1), settings()["loss"], metrics=["accuracy"])
    return made


class Locked(keras.Model):
    """A subclass without a configuration, with a lock, that learns its widths when it is called."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        self.lock, self.first, self.last = threading.Lock(), dense(8, 1, activation="tanh"), dense(3, 2)

    def call(self, x: Any) -> Any:
        with self.lock:
            return self.last(self.first(x))


class Shifted(layers.Layer):
    """A layer whose configuration leaves out what it computes with."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def call(self, x: Any) -> Any:
        return x + keras.ops.convert_to_tensor(self.table)

    def get_config(self) -> dict[str, Any]:
        return {}


def shifted(shapes: Any) -> Any:
    return keras.Sequential([keras.Input(shapes[0][1:]), Shifted(np.full(6, 0.5, "f4")), dense(3, 1)])


def lambdas(shapes: Any) -> Any:
    factor = 2.0
    x = keras.Input(shapes[0][1:])
    return keras.Model(x, dense(3, 1)(layers.Lambda(lambda each: keras.ops.tanh(each) * factor)(x)))


KINDS = [unbuilt, compiled, Locked, shifted, lambdas]


def expected_of(make: Callable[..., Any], dataset: Dataset) -> Any:
    """Return the model that plain Keras trains in one process."""
    net = make() if make is compiled else make([(-1, 6)])
    net.compile(keras.optimizers.SGD(0.1), settings()["loss"])
    for epoch in range(2):
        with dataset.reader("train", batch_size=16, shuffle=False) as reader:
            for batch in reader.epoch(epoch):
                net.train_on_batch(batch.tensors["features_0"], batch.tensors["label_0"])
    return net


def first_rows(dataset: Dataset) -> Any:
    with dataset.reader("train", batch_size=4, shuffle=False) as reader:
        return next(iter(reader.epoch(0))).tensors["features_0"].copy()


def assert_same(fitted: ElasticKerasModel, expected: Any, dataset: Dataset) -> None:
    """Compare the weights, and the outputs of the model as it travels to executors."""
    for value, wanted in zip(fitted.keras_model.get_weights(), expected.get_weights(), strict=True):
        assert value == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    rows = first_rows(dataset)
    (output,) = pickle.loads(dumps(fitted._predictor()))()({"features_0": rows})
    assert output == pytest.approx(expected.predict_on_batch(rows), rel=1e-4, abs=1e-5)


def chosen(make: Any) -> dict[str, Any]:
    own = {"optimizer": None, "loss": None} if make is compiled else {}
    return {"model": make, "shuffle": False, **own}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_model_of_a_function_is_trained_as_by_plain_keras(make: Any, dataset: Dataset, tmp_path: Path) -> None:
    made = estimator(**chosen(make))
    fitted = made.from_dataset_path(dataset)
    expected = expected_of(make, dataset)
    assert_same(fitted, expected, dataset)
    assert_same(fitted.copy(), expected, dataset)
    fitted.save(path := str(tmp_path / "model"))
    if make in (unbuilt, compiled):  # Keras's own layers: a configuration, which runs no code
        loaded = load_module(path)
    else:
        with pytest.raises(CheckpointError, match=r"model_function in .* can only be loaded by running code"):
            load_module(path)
        loaded = load_module(path, trusted=True)
    assert not loaded.compiled
    assert not (make is unbuilt and loaded.inputs[0].shape[0])
    assert loaded.predict_on_batch(first_rows(dataset)) == pytest.approx(
        expected.predict_on_batch(first_rows(dataset)), rel=1e-4, abs=1e-5
    )
    again = ElasticKerasModel.load(path, trusted=True)
    again.save(twice := str(tmp_path / "twice"))
    assert_same(ElasticKerasModel.load(twice, trusted=True), expected, dataset)


@pytest.mark.parametrize("make", by_night(KINDS, but=[Locked]), ids=lambda make: make.__name__)
def test_two_workers_train_the_model_of_a_function_as_one(make: Any, dataset: Dataset) -> None:
    fitted = ElasticKerasEstimator(**settings(**chosen(make), num_proc=2)).from_dataset_path(dataset)
    assert_same(fitted, expected_of(make, dataset), dataset)
    assert [event["after"] for event in fitted.events if event["kind"] == "started"] == [2]
    assert set(fitted.history.names) >= ({"accuracy"} if make is compiled else {"loss"})


# --- inputs, seeds and names ----------------------------------------------------------------------------


def by_name(shapes: Any) -> Any:
    """Inputs "b", "a" in a list; a column of each has its name, and they were written in the other order."""
    assert shapes == [(-1, 3), (-1, 2)], "in the order of the columns"
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    return keras.Model([b, a], dense(3, 1)(layers.Concatenate()([3.0 * b, a])))


def in_dict(shapes: Any) -> Any:
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    return keras.Model({"b": b, "a": a}, dense(3, 1)(layers.Concatenate()([3.0 * b, a])))


@pytest.mark.parametrize("make", [by_name, in_dict], ids=lambda make: make.__name__)
def test_columns_go_to_the_inputs_of_their_names(make: Any, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    rows = {"features_0": generator.normal(size=(32, 3)), "features_1": generator.normal(size=(32, 2))}
    packed = pack({**rows, "label_0": np.arange(32) % 3}, tmp_path / "set")
    fields = [replace(each, columns=(name,)) for each, name in zip(packed.layout.fields, "abl", strict=True)]
    about = {"settings": {"pad_to": {"features_0": 3}}}
    layout = replace(packed.layout, fields=tuple(fields))
    dataset = replace(packed, manifest=replace(packed.manifest, layout=layout, about=about))
    fitted = estimator(model=make, shuffle=False, epochs=1).from_dataset_path(dataset)
    net = make([(-1, 3), (-1, 2)])
    net.compile(keras.optimizers.SGD(0.1), settings()["loss"])
    a, b, label = rows["features_0"].astype("f4"), rows["features_1"].astype("f4"), np.arange(32) % 3
    for part in (slice(0, 16), slice(16, 32)):
        net.train_on_batch([b[part], a[part]] if make is by_name else {"a": a[part], "b": b[part]}, label[part])
    assert weights_of(fitted) == pytest.approx([float(n) for w in net.get_weights() for n in w.reshape(-1)], abs=1e-6)
    frame = pandas.DataFrame({"b": list(b), "a": list(a)})
    given = [b, a] if make is by_name else {"a": a, "b": b}
    assert np.stack(fitted.predict(frame)["output"]) == pytest.approx(net.predict_on_batch(given), abs=1e-5)
    assert fitted._facts_of_fit().pad_to == {"features_1" if make is by_name else "features_0": 3}


def test_function_gets_the_shapes_that_the_model_sees(dataset: Dataset) -> None:
    units = 3

    def make(shapes: Any) -> Any:
        return keras.Sequential([keras.layers.Dense(units, name=f"from_{'_'.join(map(str, shapes[0][1:]))}")])

    def wider(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "features_0": np.concatenate([columns["features_0"]] * 2, axis=1)}

    fitted = estimator(model=make, transformation_fn=wider, inference_fn=wider, epochs=1).from_dataset_path(dataset)
    assert fitted.keras_model.layers[0].name == "from_12"
    assert fitted.keras_model.count_params() == 39
    units = 4  # what the function refers to may change later
    assert fitted._predictor().args[0].load().count_params() == 39


def drawn(shapes: Any) -> Any:
    """Draw weights, constants and the width from all generators; name layers as Keras does."""
    table = np.float32(random.random() + np.random.random() + float(tf.random.uniform([])))
    table += float(keras.random.uniform([]))
    return keras.Sequential(
        [Shifted(np.full(6, table)), layers.Dense(random.randint(4, 9)), layers.Dropout(0.1), layers.Dense(3)]
    )


def test_what_the_function_draws_follows_from_the_seed_alone(dataset: Dataset) -> None:
    def trained(seed: int) -> Any:
        random.seed(len(found))  # what is drawn and named in between does not matter
        layers.Dense(1)
        found.append(estimator(model=drawn, seed=seed, epochs=1).from_dataset_path(dataset))
        return weights_of(found[-1]), found[-1].keras_model.layers[0].table[0]

    found: list[Any] = []
    tf.random.set_seed(5)
    tf.random.uniform([2])
    second = tf.random.uniform([2]).numpy()
    tf.random.set_seed(5)
    tf.random.uniform([2])
    assert trained(1) == trained(1) != trained(2)
    assert (tf.random.uniform([2]).numpy() == second).all(), "a fit leaves the program's own random numbers alone"
    made, again = found[0].keras_model, found[0]._made_by.load()
    assert [each.name for each in again.layers] == [each.name for each in made.layers]
    two = ElasticKerasEstimator(**settings(model=drawn, seed=1, epochs=1, num_proc=2)).from_dataset_path(dataset)
    assert two.keras_model.layers[0].table[0] == made.layers[0].table[0]


def test_run_of_a_function_is_resumed_and_its_best_epoch_restored(dataset: Dataset, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": Locked, "callbacks": [BestCheckpoint("steps", mode="min")]}
    runs = {"checkpoint_dir": tmp_path / "runs", "run_id": "a"}
    estimator(**changes, **runs, epochs=1).from_dataset_path(dataset)
    again = estimator(**changes, **runs, epochs=3)
    resumed = again.from_dataset_path(dataset)
    assert again.training.resume_from is not None
    assert weights_of(resumed) == weights_of(estimator(**changes, epochs=1).from_dataset_path(dataset))
    with pytest.raises(CheckpointError, match=r"has checkpoints of another training: model was '.*Locked'"):
        estimator(**{**changes, "model": shifted}, **runs).from_dataset_path(dataset)


# --- refused before workers start ---------------------------------------------------------------------


def no_model(shapes: Any) -> Any:
    keras.Sequential([keras.layers.Dense(3)])


def failing(shapes: Any) -> Any:
    return shapes[0][7]


def two(shapes: Any, classes: int) -> Any: ...


def uncompiled(shapes: Any) -> Any:
    return make_net()


def fixed_rows(shapes: Any) -> Any:
    return keras.Sequential([keras.Input(batch_shape=(32, 6)), layers.Dense(3)])


def other_width(shapes: Any) -> Any:
    return keras.Sequential([keras.Input((7,)), layers.Dense(3)])


def holding(lock: Any) -> Any:
    return lambda shapes: lock


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": no_model}, r"model=no_model must return a keras.Model; called with the shapes .*, it returned None"),
        ({"model": failing}, r"model=failing, which is called with the shapes \[\(-1, 6\)\], raised IndexError: tuple"),
        ({"model": Shifted}, "model=Shifted must return a keras.Model; called with the shapes"),
        ({"model": two}, r"model=two needs shapes, classes, and is called with .* model=lambda shapes: two\(...\)"),
        ({"model": uncompiled, "loss": None}, "loss is not set, and the model is not compiled"),
        ({"model": uncompiled, "optimizer": None}, "optimizer is not set, and the model is not compiled"),
        ({"model": uncompiled, "optimizer": "adm"}, "'adm' is not an optimizer of Keras; did you mean 'adam'"),
        ({"model": fixed_rows}, "takes batches of 32 rows only"),
        ({"model": other_width}, "is incompatible with the layer"),
        ({"model": holding(threading.Lock())}, "model=holding.* cannot be sent to the workers: .* within the function"),
        ({"model": keras.layers.Dense(3)}, "model must be a keras.Model, not <Dense .* a function that returns one"),
        ({"model": torch.nn.Linear(6, 3)}, r"model must be a keras.Model, not Linear\("),
        ({"model": lambda: make_net(), "loss": ["mse"] * 2}, "2 losses for the 1 outputs of the model"),
    ],
    ids=str,
)
def test_function_that_makes_no_model_is_refused_before_workers_start(
    changes: dict[str, Any], said: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HereEstimator, "run_job", None)
    errors = (InvalidSettingsError, DataError, NotPicklableError)
    with pytest.raises(errors, match=said) as caught:
        estimator(**changes).from_dataset_path(dataset)
    if changes["model"] is failing:  # with the frames of the function, and none of this package
        frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
        assert [each.name for each in frames] == ["failing"]


def test_function_that_makes_other_layers_each_time_is_refused(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make() -> Any:
        with (tmp_path / "calls").open("a") as file:
            file.write(".")
            return keras.Sequential([layers.Dense(3 + file.tell()), layers.Dense(3)])

    monkeypatch.setattr(HereEstimator, "run_job", None)
    with pytest.raises(InvalidSettingsError, match=r"made another model than at its first call.* same layers at each"):
        estimator(model=make).from_dataset_path(dataset)
