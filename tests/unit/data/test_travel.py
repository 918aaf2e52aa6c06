"""Columns that travel together arrive as they were, one by one."""

import numpy as np
import pytest

from spark_elastic.data import travel
from spark_elastic.data.travel import arrived, groups_of

pa = pytest.importorskip("pyarrow")


def sent(columns, groups):
    """The batch that Spark sends for these columns, given with the values of each row."""
    arrays = []
    for names in groups:
        if len(names) == 1:
            arrays.append(columns[names[0]])
        else:
            kind = columns[names[0]].type
            rows = list(zip(*(columns[name].to_pylist() for name in names), strict=True))
            arrays.append(pa.array([list(row) for row in rows], pa.list_(kind)))
    return pa.RecordBatch.from_arrays(arrays, [f"c{index}" for index in range(len(groups))])


def test_columns_of_one_type_travel_together_and_others_alone():
    types = {"a": "float", "b": "string", "c": "float", "d": "long", "e": "float", "f": "float", "g": "boolean"}
    assert groups_of(types) == (("a", "c", "e", "f"), ("b",), ("d",), ("g",))


def test_every_column_is_in_one_group_however_many_there_are():
    types = {f"c{index}": "double" for index in range(2 * travel._MOST_JOINED + 3)}
    groups = groups_of(types)
    assert sorted(name for names in groups for name in names) == sorted(types)
    assert max(map(len, groups)) <= travel._MOST_JOINED


@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("slice_of", [slice(None), slice(2, 5)])
def test_columns_arrive_with_values_and_nulls(kind, slice_of):
    values = np.random.default_rng(0).integers(-100, 100, (5, 7)).astype(kind)
    holes = np.random.default_rng(1).random((5, 7)) < 0.3
    columns = {f"n{i}": pa.array(values[i], mask=holes[i], from_pandas=False) for i in range(5)}
    columns["text"] = pa.array(list("abcdefg"))
    groups = (("n4", "n0", "n2", "n1"), ("text",), ("n3",))
    batch = sent(columns, groups).slice(slice_of.start or 0, (slice_of.stop or 7) - (slice_of.start or 0))
    found = arrived(batch, groups)
    assert set(found.schema.names) == set(columns)
    for name, expected in columns.items():
        assert found.column(found.schema.get_field_index(name)).equals(expected[slice_of]), name


@pytest.mark.parametrize("null_count", [0, 1])
def test_nan_stays_nan_beside_a_null(null_count):
    columns = {name: pa.array([1.0, np.nan, np.inf, None if null_count else 2.0]) for name in "abcd"}
    found = arrived(sent(columns, (tuple("abcd"),)), (tuple("abcd"),))
    for column in found.columns:
        assert column.null_count == null_count
        assert np.isnan(column[1].as_py())
        assert column[2].as_py() == np.inf
