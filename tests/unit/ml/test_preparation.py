"""Which tensors columns become."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml import preparation
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.ml.keras.compiling import check_columns
from spark_elastic.ml.training.dry_run import DryRunResult, warn_of_no_prediction

SCHEMA = StructType(
    [
        StructField("a", DoubleType()),
        StructField("b", IntegerType()),
        StructField("id", LongType()),
        StructField("price", DecimalType(10, 2)),
        StructField("flag", BooleanType()),
        StructField("image", ArrayType(FloatType())),
        StructField("words", ArrayType(LongType())),
        StructField("vector", VectorUDT()),
        StructField("text", StringType()),
        StructField("twice", DoubleType()),
        StructField("twice", DoubleType()),
    ]
)


@pytest.mark.parametrize(
    ("feature_cols", "columns", "dtypes"),
    [
        (["a", "b"], {"features_0": ("a", "b")}, ["<f4"]),
        (["text"], {"features_0": "text"}, []),
        (["id"], {"features_0": "id"}, ["<i8"]),
        (["words", "vector"], {"features_0": "words", "features_1": "vector"}, ["<i8", "<f4"]),
        (["image", "a"], {"features_0": "image", "features_1": ("a",)}, ["<f4", "<f4"]),
        ([["a", "price"], ["id"]], {"features_0": ("a", "price"), "features_1": "id"}, ["<f4", "<i8"]),
        ([["vector", "flag"]], {"features_0": ("vector", "flag")}, ["<f4"]),
        ([["id", "b"], ["a"]], {"features_0": ("id", "b"), "features_1": ("a",)}, ["<i8", "<f4"]),
        ([["id", "words"]], {"features_0": ("id", "words")}, ["<i8"]),
        ([["id", "a"]], {"features_0": ("id", "a")}, ["<f4"]),
        (["id", "b"], {"features_0": ("id", "b")}, ["<f4"]),
    ],
)
def test_scalars_are_stacked_and_arrays_are_separate_inputs(feature_cols: Any, columns: Any, dtypes: Any) -> None:
    made = preparation.features(SCHEMA, feature_cols, None)
    assert dict(made.columns) == columns
    assert list(made.dtypes.values()) == dtypes


def test_shapes_are_assigned_to_inputs_in_order() -> None:
    assert preparation.labels(SCHEMA, ["a"], None).columns == {"label_0": "a"}, "one number is a scalar"
    made = preparation.features(SCHEMA, ["image", "words"], [[2, 3], [4]])
    assert made.shapes == {"features_0": (2, 3), "features_1": (4,)}
    assert preparation.features(SCHEMA, ["image", "words"], [None, [4]]).shapes == {"features_1": (4,)}


def test_wrong_number_of_shapes_is_refused() -> None:
    with pytest.raises(InvalidSettingsError, match=r"1 input_shapes for 2 inputs \(image, words\)"):
        preparation.features(SCHEMA, ["image", "words"], [[2, 3]])


def test_dtype_of_each_input_can_be_set_and_none_is_the_default() -> None:
    made = preparation.features(SCHEMA, [["id", "b"], ["a"], ["b"]], None, ["float64", None, "float32"])
    assert list(made.dtypes.values()) == ["<f8", "<f4", "<f4"]
    assert made.columns["features_2"] == ("b",), "a column of numbers has an axis"
    assert dict(preparation.features(SCHEMA, ["id", "b"], None, ["int64"]).dtypes) == {"features_0": "<i8"}
    assert preparation.features(SCHEMA, ["a"], None, ["int32"]).columns == {"features_0": "a"}


def test_dtypes_that_do_not_fit_the_inputs_are_refused() -> None:
    with pytest.raises(InvalidSettingsError, match=r"1 input_dtypes for 2 inputs \(id\+b, a\)"):
        preparation.features(SCHEMA, [["id", "b"], ["a"]], None, ["int64"])
    with pytest.raises(InvalidSettingsError, match="input_dtypes has 'int64' for 'text', which is string"):
        preparation.features(SCHEMA, ["text"], None, ["int64"])


def test_label_dtype_follows_the_loss_or_the_column() -> None:
    assert list(preparation.labels(SCHEMA, ["b", "a"], None).dtypes.values()) == ["<i8", "<f4"]
    assert list(preparation.labels(SCHEMA, ["b", "a"], None, ["<f4", "<i8"]).dtypes.values()) == ["<f4", "<i8"]


def test_inner_list_of_labels_is_one_label() -> None:
    made = preparation.labels(SCHEMA, [["a", "b"], ["id"]], [[2], [1]], ["<f4", "<i8"])
    assert made.columns == {"label_0": ("a", "b"), "label_1": ("id",)}
    assert (made.dtypes, made.shapes) == ({"label_0": "<f4", "label_1": "<i8"}, {"label_0": (2,), "label_1": (1,)})
    with pytest.raises(InvalidSettingsError, match="3 label_shapes for 1 label_cols"):
        preparation.labels(SCHEMA, [["a", "b"]], [[1], [1], [1]])


def test_integers_in_arrays_become_reals_for_losses_of_numbers_alone() -> None:
    schema = StructType([*SCHEMA.fields, StructField("nested", ArrayType(ArrayType(ShortType())))])
    for names, needed, made in (
        (["words", "nested"], ["<f4", "<f4"], ["<f4", "<f4"]),
        (["words", "image"], ["<i8", "<i8"], ["<i8", "<f4"]),
        (["words", "nested"], [None, None], ["<i8", "<i8"]),
    ):
        assert list(preparation.labels(schema, names, None, needed).dtypes.values()) == made


# --- columns in another order, outputs without a prediction -------------------------------------------


def test_column_with_the_name_of_another_input_is_refused() -> None:
    with pytest.raises(InvalidSettingsError, match=r"'store' to 'day': .*in order, day, numbers, store"):
        check_columns(
            "feature_cols", "inputs", ["day", "numbers", "store"], [["store"], ["day"], ["price", "rooms"]], None
        )


def test_columns_in_order_or_with_names_of_their_own_are_accepted() -> None:
    check_columns("feature_cols", "inputs", ["day", "store"], [["day"], ["store"]], None)
    check_columns("feature_cols", "inputs", ["input_1", "input_2"], [["store"], ["day"]], None)
    check_columns("feature_cols", "inputs", None, [["store"]], None)
    check_columns("label_cols", "outputs", [None, None], [["store"], ["day"]], None)


@pytest.mark.parametrize(
    ("rule", "of_classes", "warned"), [(None, True, True), (None, False, False), ("argmax", True, False)]
)
def test_missing_prediction_is_warned_of_where_labels_are_classes(
    rule: str | None, of_classes: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spark_elastic.ml"):
        warn_of_no_prediction(DryRunResult((OutputShape("<f4", (3,)),), rule, of_classes=of_classes))
    assert ("prediction='argmax'" in caplog.text) == warned
