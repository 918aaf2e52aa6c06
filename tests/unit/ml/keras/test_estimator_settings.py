"""Settings that the Keras estimator accepts, and errors for those that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, FloatType, LongType, StructField, StructType

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic import ElasticKerasEstimator  # noqa: E402
from spark_elastic.data.dataset import pack  # noqa: E402
from spark_elastic.data.store import Store  # noqa: E402
from spark_elastic.errors import DataError, InvalidSettingsError  # noqa: E402
from tests.unit.ml.keras.estimators import estimator, make_net, settings  # noqa: E402
from tests.unit.ml.keras.test_compiling import two  # noqa: E402
from tests.unit.ml.keras.test_pickling import Own, Told  # noqa: E402


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    rows = {"features_0": np.ones((8, 6), np.float32), "label_0": np.arange(8) % 3}
    return pack(rows, tmp_path / "set")


def checked(**changes: Any) -> None:
    made = {"feature_cols": ["x"], "label_cols": ["y"], **settings(**changes)}
    ElasticKerasEstimator(**made)._check_complete(from_columns=True)


def test_integers_that_the_models_input_would_round_are_refused_while_writing() -> None:
    schema = StructType([StructField("id", LongType()), StructField("other", LongType()), StructField("y", LongType())])
    for kind, stored in (("float32", "<f4"), ("int64", "<i8")):
        net = keras.Sequential([keras.Input((2,), dtype=kind), keras.layers.Embedding(5, 3), keras.layers.Flatten()])
        made = ElasticKerasEstimator(feature_cols=[["id", "other"]], label_cols=["y"], **settings(model=net))
        assert made._tensors(schema).dtypes["features_0"] == stored
    made.setInputDtypes(["int32"])
    assert made._tensors(schema).dtypes["features_0"] == "<i4"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": Own}, r"model must be a keras.Model, not a class; make one: Own\(...\)"),
        ({"model": "net.keras"}, r"keras.saving.load_model\('net.keras'\) loads one"),
        ({"model": keras.layers.Dense(3)}, r"model must be a keras.Model, not <Dense"),
        ({"loss": None}, "loss is not set, and the model is not compiled"),
        ({"model": two(), "loss": "mse"}, r"2 losses \(of the outputs kind, size\) for 1 label_cols"),
        ({"loss": ["mse"], "loss_weights": [1, 2]}, "2 loss_weights for 1 losses"),
        ({"loss": {"a": "mse"}, "loss_weights": {"b": 2}}, "loss_weights has 'b', and loss has a"),
        ({"callbacks": [print]}, "callbacks must be a list of .*, not of <built-in function print>"),
        ({"device": "abacus"}, "'abacus' is not a device"),
        ({"consistency": "exact"}, "consistency='exact' is for PyTorch alone"),
        ({"custom_objects": [Own]}, "custom_objects must be a dict with names as keys"),
        (
            {"model": keras.Sequential([keras.Input(batch_shape=(32, 6)), keras.layers.Dense(3)])},
            "takes batches of 32 rows only",
        ),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_with_a_remedy(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSettingsError, match=said):
        checked(**changes)


SCHEMA = StructType(
    [
        StructField("x", ArrayType(FloatType())),
        StructField("number", DoubleType()),
        StructField("whole", LongType()),
        StructField("hot", VectorUDT()),
    ]
)


@pytest.mark.parametrize(
    ("loss", "label", "dtype"),
    [
        ("sparse_categorical_crossentropy", "number", "<i8"),  # as StringIndexer gives them
        ("sparse_categorical_crossentropy", "whole", "<i8"),
        ("binary_crossentropy", "whole", "<f4"),
        ("mse", "whole", "<f4"),
        ("categorical_crossentropy", "hot", "<f4"),
        (lambda label, output: label, "whole", "<i8"),
    ],
)
def test_labels_are_stored_as_the_loss_needs_them(loss: Any, label: str, dtype: str) -> None:
    made = estimator(loss=loss, feature_cols=["x"], label_cols=[label])._tensors(SCHEMA)
    assert made.dtypes["label_0"] == dtype
    one_hot = estimator(loss="categorical_crossentropy", feature_cols=["x"], label_cols=["whole"])
    with pytest.raises(DataError, match=r"'whole' is one number a row, but categorical_crossentropy .* use sparse_"):
        one_hot._tensors(SCHEMA)


def training(dataset: Any, tmp_path: Path, **changes: Any) -> Any:
    return estimator(**changes)._training(dataset, Store.create(tmp_path), None)


def test_settings_reach_the_workers(dataset: Any, tmp_path: Path) -> None:
    made = training(
        dataset,
        tmp_path,
        metrics=["accuracy"],
        weighted_metrics=["mse"],
        gradient_clip_norm=2,
        gradient_compression="bf16",
        accumulation_steps=3,
        callbacks=[keras.callbacks.EarlyStopping()],
        data_options={"prefetch": 1},
    )
    assert (made.clip_norm, made.compression, made.accumulation, made.prefetch) == (2, "bf16", 3, 1)
    compiled = made.compiled.load()
    assert (compiled.metrics, compiled.weighted_metrics) == (["accuracy"], ["mse"])
    assert [type(each).__name__ for each in made.callbacks.load()] == ["EarlyStopping"]
    assert made.optimizer_values is None


def test_state_of_a_compiled_models_optimizer_is_continued(dataset: Any, tmp_path: Path) -> None:
    net = make_net()
    net.compile(keras.optimizers.Adam(0.1), "mse")
    net.fit(np.ones((4, 6)), np.ones((4, 3)), verbose=0)
    made = training(dataset, tmp_path, model=net, optimizer=None, loss=None)
    assert int(made.optimizer_values[0]) == 1
    assert len(made.optimizer_values) == len(net.optimizer.variables)
    assert training(dataset, tmp_path, model=net).optimizer_values is None, "another optimizer"


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)]),
        lambda: Told(3),
    ],
)
def test_unbuilt_model_is_copied_and_built_for_the_columns(make: Any, dataset: Any, tmp_path: Path) -> None:
    given = make()
    first, second = (training(dataset, tmp_path, model=given).model.load().get_weights() for _ in range(2))
    assert not given.built
    assert first[0].shape[0] == 6
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)), "the seed decides"
    other = training(dataset, tmp_path, model=given, seed=5).model.load().get_weights()
    assert not np.array_equal(first[0], other[0])


@keras.saving.register_keras_serializable("test_estimator_settings")
class OnlyCalled(keras.Model):
    """A model whose `build` makes no weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.head(x)


@pytest.mark.filterwarnings("ignore:`build")
def test_model_that_was_only_told_to_build_is_built_for_the_columns(dataset: Any, tmp_path: Path) -> None:
    net = OnlyCalled()
    net.build((None, 6))
    assert net.built
    fitted = estimator(model=net, store=tmp_path, epochs=1).from_dataset_path(dataset)
    assert fitted.keras_model.count_params() == 21


def test_inputs_that_do_not_fit_are_named(dataset: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingsError, match=r"the model has 2 inputs \(a, b\), and feature_cols make 1"):
        training(dataset, tmp_path, model=two())
    wrong = keras.Sequential([keras.layers.Conv2D(3, 3)])
    with pytest.raises(InvalidSettingsError, match=r"cannot be built for rows of .* \(features_0 <f4 \[1, 6\]\)"):
        training(dataset, tmp_path, model=wrong)
    with pytest.raises(InvalidSettingsError, match="its inputs are not known because transformation_fn makes them"):
        training(dataset, tmp_path, model=keras.Sequential([keras.layers.Dense(3)]), transformation_fn=dict)


def test_the_same_model_is_described_in_the_same_words_whatever_keras_calls_it() -> None:
    described = [estimator(model=make_net())._described("model") for _ in range(2)]
    assert described[0] == described[1]
    assert estimator(model=make_net(9))._described("model") != described[0]
    rates = [estimator(optimizer=keras.optimizers.SGD(rate))._described("optimizer") for rate in (0.1, 0.1, 0.2)]
    assert rates[0] == rates[1] != rates[2]
