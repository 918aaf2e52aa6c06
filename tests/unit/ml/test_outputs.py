"""Predictions, probabilities, and the Arrow arrays of output columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type

from spark_elastic.errors import DataError
from spark_elastic.ml.added_columns import (
    AddedColumn,
    OutputShape,
    arrow_array,
    prediction,
    probability,
    raw_prediction,
    spark_type,
)


def column(dtype: str, shape: tuple[int, ...], **more: Any) -> AddedColumn:
    return AddedColumn("output", "raw", 0, "", OutputShape(dtype, shape), **more)


def test_argmax_is_the_index_of_the_largest_value() -> None:
    assert prediction(np.array([[1, 5, 2], [9, 0, 1]], "f4"), "argmax").tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rule", "expected"), [("value", [0.25, 0.75]), ("binary_logit", [1, 1]), ("binary_probability", [0, 1])]
)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_single_value_is_the_prediction_or_compared_with_a_threshold(rule: str, expected: Any, shape: Any) -> None:
    made = prediction(np.array([0.25, 0.75], "f4").reshape(shape), rule)
    assert made.dtype == np.float64
    assert made.tolist() == expected


def test_probabilities_add_up_to_one_also_for_huge_logits() -> None:
    made = probability(np.array([[1e4, 0], [0, 0]], "f4"), "argmax")
    assert made.tolist() == [[1, 0], [0.5, 0.5]]
    binary = probability(np.array([[-1e4], [0], [1e4]], "f4"), "binary_logit")
    assert binary.tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    assert probability(np.array([0.25]), "binary_probability").tolist() == [[0.75, 0.25]]


@pytest.mark.parametrize(
    ("rule", "output", "expected"),
    [
        ("argmax", [[3.0, -1.0]], [[3.0, -1.0]]),
        ("argmax_probability", [[0.75, 0.25]], [[0.75, 0.25]]),
        ("binary_logit", [[2.0], [-0.5]], [[-2.0, 2.0], [0.5, -0.5]]),
        ("binary_logit", [2.0, -0.5], [[-2.0, 2.0], [0.5, -0.5]]),
        ("binary_probability", [0.25], [[0.75, 0.25]]),
    ],
)
def test_raw_prediction_is_a_score_for_each_class(rule: str, output: Any, expected: Any) -> None:
    made = raw_prediction(np.array(output, "f4"), rule)
    assert made.dtype == np.float64
    assert made.tolist() == expected


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "|i1", "<i4", "<i8", "|u1", "|b1"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("rows", [0, 4])
def test_the_arrow_type_is_the_one_that_spark_expects_for_the_column(dtype: str, shape: Any, rows: int) -> None:
    values = np.ones((rows, *shape), dtype)
    made = arrow_array(column(dtype, shape), values)
    assert made.type == to_arrow_type(spark_type(column(dtype, shape)))
    assert made.to_pylist() == values.tolist()


def test_vectors_have_the_layout_of_spark_ml() -> None:
    made = arrow_array(column("<f4", (2,), as_vector=True), np.array([[1, 2], [3, 4]], "f4"))
    assert made.to_pylist()[1] == {"type": 1, "size": None, "indices": None, "values": [3.0, 4.0]}
    assert not made.type.field("type").nullable
    assert made.type.field("values").type == pa.list_(pa.field("element", pa.float64(), nullable=False))


def test_output_with_another_number_of_axes_than_in_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"has shape \[5, 2\] here; when it was fitted, a row had shape \[\]"):
        column("<f4", ()).values([np.zeros((5, 2))])
