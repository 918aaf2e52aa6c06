"""The arguments that a model is compiled with, and the properties of its losses."""

from __future__ import annotations

from typing import Any

import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic import ElasticKerasEstimator  # noqa: E402
from spark_elastic.errors import InvalidSettingsError  # noqa: E402
from spark_elastic.ml.keras import compiling  # noqa: E402
from spark_elastic.ml.keras.compiling import (  # noqa: E402
    check_losses,
    check_named,
    compile_arguments,
    order_by_name,
)


def own(label: Any, output: Any) -> Any:
    return label - output


def two(as_dict: bool = False) -> Any:
    """Inputs "a" and "b", outputs "kind" and "size"."""
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    kind = keras.layers.Dense(4, name="kind")(joined)
    size = keras.layers.Dense(1, name="size")(joined)
    if as_dict:
        return keras.Model({"b": b, "a": a}, {"size": size, "kind": kind})
    return keras.Model([a, b], [kind, size])


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
        ({"size": "mse"}, r"1 losses \(of the outputs size\) for 2 label_cols \(x, y\)"),
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
    [
        (["b", "a"], [1, 0]),
        ([["x"], ["a"]], [1, 0]),
        (["a", "x"], [0, 1]),
        (["x", "y"], None),
        (["a"], None),
    ],
)
def test_columns_go_to_the_inputs_of_their_names(columns: Any, order: Any) -> None:
    assert order_by_name(of_dict("b", "a"), columns) == order
    given = ElasticKerasEstimator(model=of_dict("b", "a"), feature_cols=columns, input_shapes=[(2,), (1, 2)])
    if order == [1, 0]:
        assert given._given("feature_cols") == columns[::-1]
        assert given._given("input_shapes") == [[1, 2], [2]]
        assert given.getFeatureCols() == columns


def test_columns_of_other_names_are_refused_for_a_dict_of_equal_shapes() -> None:
    with pytest.raises(
        InvalidSettingsError, match=r"'x' and 'y' to 'a' and 'b', which are inputs of one shape in a dict"
    ):
        check_named("feature_cols", "inputs", of_dict("b", "a")._inputs_struct, [["x"], ["y"]])
    check_named("feature_cols", "inputs", of_dict("b", "a")._inputs_struct, [["a"], ["y"]])
    wide = {"a": keras.Input((2,)), "b": keras.Input((3,))}
    check_named("feature_cols", "inputs", wide, [["x"], ["y"]])
    check_named("feature_cols", "inputs", [keras.Input((2,))] * 2, [["x"], ["y"]])
