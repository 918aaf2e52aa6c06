"""Every type of column that can be stored is read with the values that it had in Spark."""

import datetime
import decimal

import numpy as np
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import Kind
from spark_elastic.data.materialization import materialize
from tests.integration.data.conftest import Rows
from tests.unit.data.datasets import field_of


def written(spark, store, schema, rows, tensors, **options):
    """Write rows, and return the dataset and the stored rows in their order."""
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), schema)
    dataset = materialize(frame, tensors, store=store, **options)
    assert Dataset.open(dataset.store) == dataset
    assert dataset.rows() == len(rows)
    return dataset, Rows(dataset)


def test_scalars_keep_their_types(spark, store):
    day, moment = datetime.date(2020, 2, 29), datetime.datetime(2020, 2, 29, 12, 30, 0, 123456)
    types = {
        "byte": (T.ByteType(), "|i1", [-128, 127]),
        "short": (T.ShortType(), "<i2", [-(2**15), 2**15 - 1]),
        "int": (T.IntegerType(), "<i4", [-(2**31), 2**31 - 1]),
        "long": (T.LongType(), "<i8", [-(2**63), 2**63 - 1]),
        "float": (T.FloatType(), "<f4", [0.1, -1e30]),
        "double": (T.DoubleType(), "<f8", [0.1, -1e300]),
        "flag": (T.BooleanType(), "|b1", [True, False]),
        "price": (T.DecimalType(12, 2), "<f8", [decimal.Decimal("1234567.25"), decimal.Decimal("-0.50")]),
        "day": (T.DateType(), "<i8", [day, datetime.date(1969, 12, 31)]),
        "at": (T.TimestampNTZType(), "<i8", [moment, datetime.datetime(1970, 1, 1)]),
        "took": (T.DayTimeIntervalType(), "<i8", [datetime.timedelta(days=1), datetime.timedelta(0, 0, 5)]),
    }
    schema = T.StructType([T.StructField(name, kind) for name, (kind, _, _) in types.items()])
    rows = list(zip(*(values for _, _, values in types.values()), strict=True))
    dataset, stored = written(spark, store, schema, rows, {name: name for name in types})
    assert {field.name: field.dtype for field in dataset.layout.fields} == {n: d for n, (_, d, _) in types.items()}
    assert all(field.shape == () for field in dataset.layout.fields)
    for name in ("byte", "short", "int", "long", "double", "flag"):
        assert stored[name].tolist() == types[name][2]
    assert stored["float"].tolist() == np.array([0.1, -1e30], np.float32).tolist()
    assert stored["price"].tolist() == [1234567.25, -0.5]
    assert stored["day"].tolist() == [18321, -1]
    assert stored["at"].tolist() == [18321 * 86_400_000_000 + 45_000_123_456, 0]
    assert stored["took"].tolist() == [86_400_000_000, 5]


def test_columns_of_one_type_that_travel_together_keep_their_values(spark, store):
    kinds = {"float": "<f4", "double": "<f8", "byte": "|i1", "short": "<i2", "int": "<i4", "bigint": "<i8"}
    names = [f"{kind}.{index}" for index in range(5) for kind in kinds]
    fields = ", ".join(f"`{name}` {name.partition('.')[0]}" for name in names)
    rows = [tuple(float(n) if name[0] in "fd" else n for n, name in enumerate(names, 30 * row)) for row in (0, 1, 2)]
    tensors = {kind: [f"{kind}.{index}" for index in (3, 0, 4, 1, 2)] for kind in kinds}
    dataset, stored = written(spark, store, fields, rows, tensors)
    assert {field.name: field.dtype for field in dataset.layout.fields} == kinds
    for kind, joined in tensors.items():
        places = [names.index(name) for name in joined]
        assert stored[kind].tolist() == [[row[place] for place in places] for row in rows]


def test_timestamps_are_microseconds_of_utc_whatever_the_session_says(spark, store):
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        frame = spark.sql("select timestamp'1970-01-01 00:00:01 UTC' at")
        assert Rows(materialize(frame, {"at": "at"}, store=store))["at"].tolist() == [1_000_000]
    finally:
        spark.conf.unset("spark.sql.session.timeZone")


def test_columns_are_joined(spark, store):
    dataset, stored = written(
        spark,
        store,
        "a float, b array<double>, c int, v array<array<float>>",
        [(1.0, [2.0, 3.0], 4, [[5.0], [6.0]]), (10.0, [20.0, 30.0], 40, [[50.0], [60.0]])],
        {"x": ["a", "b", "c", "v"], "alone": "a", "stacked": ["a"], "arrays": ["b"], "again": ["c", "a"]},
        dtypes={"x": "float32"},
    )
    assert stored["x"].tolist() == [[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]]
    assert {field.name: field.shape for field in dataset.layout.fields} == {
        "x": (6,),
        "alone": (),
        "stacked": (1,),
        "arrays": (2,),
        "again": (2,),
    }
    assert field_of(dataset, "again").dtype == "<f8"  # numpy's result type of int32 and float32
    assert stored["again"].tolist() == [[4, 1], [40, 10]]


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        ("array<boolean>", [[True, False]] * 3, "|b1"),
        ("array<long>", [[2**62, -1]] * 3, "<i8"),
        ("array<decimal(5,1)>", [[decimal.Decimal("1.5"), decimal.Decimal("2.5")]] * 3, "<f8"),
        ("array<array<decimal(5,1)>>", [[[decimal.Decimal("1.5"), decimal.Decimal("2.5")]]] * 3, "<f8"),
        ("array<date>", [[datetime.date(1970, 1, 2)] * 2] * 3, "<i8"),
        ("array<timestamp_ntz>", [[datetime.datetime(1970, 1, 1, 0, 0, 0, 7)] * 2] * 3, "<i8"),
    ],
)
def test_arrays_of_all_scalar_types_are_stored(spark, store, kind, values, dtype):
    dataset, stored = written(spark, store, f"x {kind}", [(value,) for value in values], {"x": "x"})
    assert field_of(dataset, "x").dtype == dtype
    expected = {"array<date>": [1, 1], "array<timestamp_ntz>": [7, 7]}.get(kind, values[0])
    assert stored["x"].tolist() == [np.array(expected).astype(dtype).tolist()] * 3


def test_nested_arrays_have_as_many_axes(spark, store):
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(5, 2, 3, 4)
    dataset, stored = written(
        spark, store, "x array<array<array<float>>>", [(value.tolist(),) for value in values], {"x": ["x"]}
    )
    assert field_of(dataset, "x").shape == (2, 3, 4)
    np.testing.assert_array_equal(stored["x"], values)


def test_short_sparse_vectors_are_stored_densely_also_among_dense_ones(spark, store):
    rows = [(Vectors.sparse(4, [1, 3], [2.0, 4.0]),), (Vectors.dense([1, 0, 0, 7]),), (Vectors.sparse(4, [], []),)]
    schema = T.StructType([T.StructField("x", VectorUDT())])
    _, stored = written(spark, store, schema, rows, {"x": "x"})
    assert stored["x"].tolist() == [[0, 2, 0, 4], [1, 0, 0, 7], [0, 0, 0, 0]]


def densified(values, width, dtype):
    out = np.zeros((len(values), width), dtype)
    for row, data in enumerate(values):
        count = len(data) // (4 + out.itemsize)
        out[row, np.frombuffer(data[: 4 * count], np.int32)] = np.frombuffer(data[4 * count :], dtype)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_sparse_vectors_are_stored_sparsely(spark, store, dtype):
    rng = np.random.default_rng(1)
    expected = np.zeros((50, 10_000))
    rows = []
    for row in range(50):
        places = np.sort(rng.choice(10_000, int(rng.integers(0, 30)), replace=False))
        expected[row, places] = rng.standard_normal(len(places))
        # one of them dense, as a VectorAssembler may leave it
        dense = row == 17
        rows.append((Vectors.dense(expected[row]) if dense else Vectors.sparse(10_000, places, expected[row, places]),))
    schema = T.StructType([T.StructField("x", VectorUDT())])
    dataset, stored = written(spark, store, schema, rows, {"x": "x"}, dtypes={"x": dtype})
    assert (field_of(dataset, "x").kind, field_of(dataset, "x").shape) == (Kind.SPARSE, (10_000,))
    np.testing.assert_array_equal(densified(stored["x"], 10_000, dtype), expected.astype(dtype))


def test_partitions_with_different_first_rows_are_stored_alike(spark, store):
    rows = [(Vectors.dense(np.ones(5000)),), (Vectors.sparse(5000, [7], [1.0]),)]
    schema = T.StructType([T.StructField("x", VectorUDT())])
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 2), schema)
    dataset = materialize(frame, {"x": "x"}, store=store)
    assert field_of(dataset, "x").kind is Kind.SPARSE
    found = densified(Rows(dataset)["x"], 5000, np.float64)
    assert found.sum(axis=1).tolist() == [5000, 1]


def test_binary_of_one_length_is_a_tensor_of_bytes(spark, store):
    rows = [(bytes([n, 255 - n, 7]),) for n in range(5)]
    dataset, stored = written(spark, store, "x binary", rows, {"x": "x"})
    assert (field_of(dataset, "x").dtype, field_of(dataset, "x").shape) == ("|u1", (3,))
    assert [bytes(value) for value in stored["x"]] == [value for (value,) in rows]


def test_values_of_variable_length_are_in_the_sidecar(spark, store):
    rows = [(b"", "", [], 1), (b"\0\1", "grün", [5, -6], 2), (b"x" * 1000, "z" * 300, list(range(90)), 3)]
    dataset, stored = written(
        spark,
        store,
        "b binary, s string, a array<int>, n int",
        rows,
        {"b": "b", "s": "s", "a": "a", "n": "n"},
        variable=["b", "a"],
        dtypes={"a": "int64"},
    )
    assert [field_of(dataset, name).kind for name in "bsan"] == [Kind.BYTES, Kind.STRING, Kind.ARRAY, Kind.DENSE]
    assert stored["b"] == [row[0] for row in rows]
    assert [value.decode() for value in stored["s"]] == [row[1] for row in rows]
    assert [np.frombuffer(value, np.int64).tolist() for value in stored["a"]] == [row[2] for row in rows]
    assert stored["n"].tolist() == [1, 2, 3]


def test_nan_and_infinity_are_stored_if_allowed(spark, store):
    rows = [(float("nan"), 1.0), (float("inf"), 2.0)]
    _, stored = written(
        spark, store, "x double, y double", rows, {"x": "x", "y": "y"}, allow_nan=["x"], dtypes={"x": "float32"}
    )
    assert np.isnan(stored["x"][0])
    assert np.isinf(stored["x"][1])


def test_column_names_may_hold_anything(spark, store):
    frame = spark.range(3).select(F.col("id").alias("a.b `c`"))
    assert sorted(Rows(materialize(frame, {"x": "a.b `c`"}, store=store))["x"].tolist()) == [0, 1, 2]


def test_a_table_of_many_batches_and_partitions_arrives_whole(spark, store):
    frame = spark.range(0, 50_000, 1, 5).select(
        "id", F.array(*[(F.col("id") % n).cast("float") for n in range(1, 9)]).alias("x"), F.hex("id").alias("text")
    )
    dataset = materialize(frame, {"x": "x", "id": "id", "text": "text"}, store=store, shard_bytes=100_000)
    stored = Rows(dataset)
    assert stored["id"].tolist() == list(range(50_000))  # shards are listed in the order of the partitions
    np.testing.assert_array_equal(stored["x"], np.arange(50_000)[:, None] % np.arange(1, 9))
    assert stored["text"] == [b"%X" % n for n in range(50_000)]
    runs = {}
    for shard in dataset.manifest.splits["train"]:
        runs.setdefault(shard.file.split("-")[1], []).append(shard)
    assert len(runs) == 5
    assert all(len(shards) > 2 for shards in runs.values())
