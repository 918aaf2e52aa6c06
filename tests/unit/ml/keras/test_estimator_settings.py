"""Settings that the Keras estimator accepts, and errors for those that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, FloatType, LongType, StructField, StructType

from spark_elastic import ElasticKerasEstimator
from spark_elastic.data.dataset import pack
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.keras import compiling
from spark_elastic.ml.keras.compiling import check_columns, check_losses, compile_arguments, order_by_name
from tests.unit.ml.keras.estimators import estimator, make_net, settings
from tests.unit.ml.keras.test_pickling import Own, Told


def two(as_dict: bool = False) -> Any:
    """Inputs "a" and "b", outputs "kind" and "size"."""
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    kind = keras.layers.Dense(4, name="kind")(joined)
    size = keras.layers.Dense(1, name="size")(joined)
    if as_dict:
        return keras.Model({"b": b, "a": a}, {"size": size, "kind": kind})
    return keras.Model([a, b], [kind, size])


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    rows = {"features_0": np.ones((8, 6), np.float32), "label_0": np.arange(8) % 3}
    return pack(rows, tmp_path / "set")


def checked(**changes: Any) -> None:
    made = {"feature_cols": ["x"], "label_cols": ["y"], **settings(**changes)}
    ElasticKerasEstimator(**made)._fit_run().check_settings()


def test_integers_that_the_models_input_would_round_are_refused_while_writing() -> None:
    schema = StructType([StructField("id", LongType()), StructField("other", LongType()), StructField("y", LongType())])
    for kind, stored in (("float32", "<f4"), ("int64", "<i8")):
        net = keras.Sequential([keras.Input((2,), dtype=kind), keras.layers.Embedding(5, 3), keras.layers.Flatten()])
        made = ElasticKerasEstimator(feature_cols=[["id", "other"]], label_cols=["y"], **settings(model=net))
        assert made._fit_run().tensors(schema).dtypes["features_0"] == stored
    made.setInputDtypes(["int32"])
    assert made._fit_run().tensors(schema).dtypes["features_0"] == "<i4"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
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
    made = estimator(loss=loss, feature_cols=["x"], label_cols=[label])._fit_run().tensors(SCHEMA)
    assert made.dtypes["label_0"] == dtype
    one_hot = estimator(loss="categorical_crossentropy", feature_cols=["x"], label_cols=["whole"])
    with pytest.raises(DataError, match=r"'whole' is one number a row, but categorical_crossentropy .* use sparse_"):
        one_hot._fit_run().tensors(SCHEMA)


def training(dataset: Any, tmp_path: Path, **changes: Any) -> Any:
    run = estimator(**changes)._fit_run()
    run.dataset = dataset
    return run.make_training(Store.create(tmp_path))


def test_state_of_a_compiled_models_optimizer_is_continued(dataset: Any, tmp_path: Path) -> None:
    net = make_net()
    net.compile(keras.optimizers.Adam(0.1), "mse")
    net.fit(np.ones((4, 6)), np.ones((4, 3)), verbose=0)
    made = training(dataset, tmp_path, model=net, optimizer=None, loss=None)
    assert int(made.optimizer_values[0]) == 1
    assert len(made.optimizer_values) == len(net.optimizer.variables)
    assert training(dataset, tmp_path, model=net).optimizer_values is None, "another optimizer"


@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)]), lambda: Told(3)]
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
    with pytest.raises(InvalidSettingsError, match=r"cannot be built for rows of .* \(features_0 float32 \[1, 6\]\)"):
        training(dataset, tmp_path, model=wrong)
    with pytest.raises(InvalidSettingsError, match="its inputs are not known because transformation_fn makes them"):
        training(dataset, tmp_path, model=keras.Sequential([keras.layers.Dense(3)]), transformation_fn=dict)


def test_the_same_model_is_described_in_the_same_words_whatever_keras_calls_it() -> None:
    def described(name: str, value: Any) -> str:
        return estimator(**{name: value})._fit_run().described(name)

    models = [described("model", make_net(width)) for width in (8, 8, 9)]
    assert models[0] == models[1] != models[2]
    rates = [described("optimizer", keras.optimizers.SGD(rate)) for rate in (0.1, 0.1, 0.2)]
    assert rates[0] == rates[1] != rates[2]


# --- arguments of compile -----------------------------------------------------------------------------


def own(label: Any, output: Any) -> Any:
    return label - output


@pytest.mark.parametrize(
    ("loss", "rule", "label"),
    [
        ("mse", "value", "<f4"),
        ("sparse_categorical_crossentropy", "argmax_probability", "<i8"),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), "argmax", "<i8"),
        (keras.losses.CategoricalCrossentropy(), "argmax_probability", "<f4"),
        ("binary_crossentropy", "binary_probability", "<f4"),
        (keras.losses.BinaryCrossentropy(from_logits=True), "binary_logit", "<f4"),
        (keras.losses.Hinge(), "binary_logit", "<f4"),
        (keras.losses.mean_absolute_error, "value", "<f4"),
        ({"class_name": "Huber", "module": "keras.losses", "config": {}}, "value", "<f4"),
        (own, None, None),
        (keras.losses.Dice(), None, None),
    ],
    ids=str,
)
def test_loss_decides_the_prediction_and_the_type_of_labels(loss: Any, rule: Any, label: Any) -> None:
    assert (compiling.rule(loss), compiling.label_dtype(loss)) == (rule, label)


def test_settings_come_before_what_the_model_was_compiled_with() -> None:
    model = two()
    model.compile("sgd", loss=["mse", "mae"], loss_weights=[1, 2], metrics=[["mse"], ["mae"]])
    none: dict[str, Any] = dict.fromkeys(("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics"))
    its_own = compile_arguments(model, **none)
    assert isinstance(its_own.optimizer, keras.optimizers.SGD)
    assert (its_own.loss, its_own.loss_weights, its_own.metrics) == (["mse", "mae"], [1, 2], [["mse"], ["mae"]])
    changed = compile_arguments(model, **{**none, "optimizer": "adam", "loss": "mse", "metrics": []})
    assert isinstance(changed.optimizer, keras.optimizers.Adam)
    assert (changed.loss, changed.loss_weights, changed.metrics) == ("mse", None, [])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (None, "optimizer is not set, and the model is not compiled"),
        ("adan", "did you mean 'adam'"),
        (keras.optimizers.Adam, r"make one: Adam\(\)"),
        (3, "must be a keras.optimizers.Optimizer, its name or its configuration, not 3"),
    ],
)
def test_value_that_is_not_an_optimizer_is_refused(optimizer: Any, said: str) -> None:
    with pytest.raises(InvalidSettingsError, match=said):
        compile_arguments(two(), optimizer=optimizer, loss="mse")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("msee", "loss='msee' is not a loss of Keras"),
        (keras.losses.MeanSquaredError, r"make one: MeanSquaredError\(\)"),
        (["mse"], "1 losses for the 2 outputs of the model"),
        ({"colour": "mse"}, "'colour', and the model's outputs are kind, size"),
        ({"size": "mse"}, r"1 losses \(of the outputs size\) for 2 label_cols \['x', 'y'\]"),
    ],
)
def test_loss_that_does_not_fit_the_outputs_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(InvalidSettingsError, match=said):
        check_losses(two(), loss, ["x", "y"])


@pytest.mark.parametrize("as_dict", [False, True])
def test_losses_belong_to_outputs_in_their_order(as_dict: bool) -> None:
    model = two(as_dict)
    assert check_losses(model, {"size": "mae", "kind": "mse"}, ["x", "y"]) == [("kind", "mse"), ("size", "mae")]
    assert check_losses(model, "mse", ["x", "y"]) == [("kind", "mse"), ("size", "mse")]
    assert check_losses(model, ["mse", None], ["x"]) == [("kind", "mse")]


def of_dict(*names: str, width: int = 2) -> Any:
    inputs = {name: keras.Input((width,), name=name) for name in names}
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.concatenate(list(inputs.values()))))


@pytest.mark.parametrize(
    ("columns", "order"),
    [(["b", "a"], [1, 0]), ([["x"], ["a"]], [1, 0]), (["a", "x"], [0, 1]), (["x", "y"], None), (["a"], None)],
)
def test_columns_go_to_the_inputs_of_their_names(columns: Any, order: Any) -> None:
    assert order_by_name(of_dict("b", "a"), columns) == order
    given = ElasticKerasEstimator(model=of_dict("b", "a"), feature_cols=columns, input_shapes=[(2,), (1, 2)])
    if order == [1, 0]:
        assert given._fit_run().given("feature_cols") == columns[::-1]
        assert given._fit_run().given("input_shapes") == [[1, 2], [2]]
        assert given.getFeatureCols() == columns


def test_columns_of_other_names_are_refused_for_a_dict_of_equal_shapes() -> None:
    with pytest.raises(
        InvalidSettingsError, match=r"'x' and 'y' to 'a' and 'b', which are inputs of one shape in a dict"
    ):
        check_columns("feature_cols", "inputs", None, [["x"], ["y"]], of_dict("b", "a")._inputs_struct)
    check_columns("feature_cols", "inputs", None, [["a"], ["y"]], of_dict("b", "a")._inputs_struct)
    wide = {"a": keras.Input((2,)), "b": keras.Input((3,))}
    check_columns("feature_cols", "inputs", None, [["x"], ["y"]], wide)
    check_columns("feature_cols", "inputs", None, [["x"], ["y"]], [keras.Input((2,))] * 2)
