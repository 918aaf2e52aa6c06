"""Values that cannot be stored are reported: the column, the number of rows, what was found and what was expected."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from spark_elastic.data.arrow_values import RowsRefused, error_of, filled
from spark_elastic.data.columns import Request
from spark_elastic.data.encode import Encoder

NAN = float("nan")
FLOAT, DOUBLE, INT = T.FloatType(), T.DoubleType(), T.IntegerType()
FLOATS, INTS, NESTED = T.ArrayType(FLOAT), T.ArrayType(INT), T.ArrayType(T.ArrayType(INT))
NO_OPTIONS: dict[str, Any] = {"dtypes": {}, "shapes": {}, "pad_to": {}, "variable": (), "sparse": {}}


@pytest.mark.parametrize(
    ("kind", "values", "options", "complaint"),
    [
        (FLOAT, [1.0, None, None], {}, r"column 'x': 2 of 3 rows read have null \(the first is row 1 of"),
        (T.StringType(), ["a", None], {}, "column 'x': 1 of 2 rows read have null"),
        (FLOATS, [[1.0], None], {}, "1 of 2 rows read have null .*na.drop"),
        (FLOATS, [[1.0, 2.0], [None, None]], {}, "1 of 2 rows .* null within the array .* row 1"),
        (DOUBLE, [1.0, NAN, float("inf"), 2.0], {}, "2 of 4 .* NaN or infinity .*row 1 .*allow_nan"),
        (FLOATS, [[1.0, NAN], [NAN, NAN]], {}, "2 of 2 rows read have NaN or infinity"),
        (FLOATS, [[1.0], [NAN, 1.0]], {"pad_to": {"x": 2}}, "1 of 2 rows .* NaN .* row 1"),
        (FLOATS, [[1.0, NAN], [2.0]], {"variable": ["x"]}, "1 of 2 rows .* NaN .* row 0"),
        (INTS, [[1, 2], [3, 4], [5]], {}, "1 of 3 .* arrays of 1 .*row 2.*arrays of 2 .*pad_to="),
        (INTS, [[1], [3, 4]], {"pad_to": {"x": 1}}, r"arrays of 2 .*expected arrays of 1 at most"),
        (INTS, [[], []], {}, "arrays of 0 .*expected at least one value"),
        (NESTED, [[[1], [2]], [[3], [4, 5]]], {}, "1 of 2 .* inner arrays of 2 .*inner arrays of 1"),
        (T.BinaryType(), [b"abc", b"ab"], {}, "byte strings of 2 .*byte strings of 3 .*variable="),
        (INTS, [[1, 2, 3]], {"shapes": {"x": (2, 2)}}, r"3 values .*expected 4 for a shape of \[2, 2\]"),
        (INT, [1, 300], {"dtypes": {"x": "int8"}}, "1 of 2 .* numbers such as 300 .*what int8 can hold"),
        (FLOAT, [1.0, 1.5], {"dtypes": {"x": "int32"}}, "numbers such as 1.5 .*int32 can hold.*dtypes="),
        (DOUBLE, [1.0, 1e300], {"dtypes": {"x": "float32"}}, "too large such as 1e.300 .*float32"),
        (INT, [1, 2], {"dtypes": {"x": "bool"}}, "numbers such as 2 .*what bool can hold"),
    ],
)
def test_values_that_cannot_be_stored(kind: Any, values: list[Any], options: dict[str, Any], complaint: str) -> None:
    more = {"allow_nan": False, "validation": None, "seed": 0, "shard_bytes": 1 << 20, "pre_shuffle": None}
    request = Request({"x": "x"}, **{**NO_OPTIONS, **options, **more})
    encoder = Encoder(request.resolve(T.StructType([T.StructField("x", kind)])))
    column = pa.array(values, to_arrow_type(kind), from_pandas=False)
    with pytest.raises(RowsRefused) as refused:
        encoder.encode(pa.RecordBatch.from_arrays([column], ["x"]))
    error = error_of(refused.value.faults, encoder.rows)
    assert error.column == "x"
    assert re.search(complaint, str(error)), error


@pytest.mark.parametrize(
    ("kind", "number", "result"),
    [
        (pa.bool_(), 1, [True, True]),
        (pa.bool_(), -1, [1.0, -1.0]),
        (pa.int8(), -999, [1, -999]),
        (pa.int16(), 1e6, [1, 1_000_000]),
        (pa.int32(), 0.5, [1.0, 0.5]),
        (pa.float32(), 0.5, [1.0, 0.5]),
    ],
    ids=str,
)
def test_number_in_place_of_a_missing_value_is_that_number(kind: pa.DataType, number: float, result: list[Any]) -> None:
    made = filled(pa.array([1, None], pa.int8()).cast(kind), number, False)
    assert made.to_pylist() == result
