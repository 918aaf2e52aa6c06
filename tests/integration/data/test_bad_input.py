"""A write that cannot be done is reported, and leaves nothing; `tests/unit/data/test_bad_values.py` has the values."""

import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_elastic.data.catalog import DATASETS
from spark_elastic.data.materialization import materialize
from spark_elastic.errors import DataError, InvalidSettingsError, StoreError


def refused(spark, store, schema, rows, *, parts=1, tensors=None, **options):
    """Return the error of a write, after a check that nothing was left in the store."""
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, parts), schema)
    with pytest.raises(DataError) as caught:
        materialize(frame, tensors or {"x": "x"}, store=store, **options)
    left = [entry.path for entry in store.list(recursive=True) if not entry.is_dir]
    assert left == []
    return caught.value


def assert_matches(pattern, text):
    with pytest.raises(DataError, match=pattern):
        raise DataError(text)


def test_the_rows_of_all_tasks_are_counted_together(spark, store):
    values = [(float(n), None if n % 4 == 3 else 1) for n in range(40)]
    error = refused(spark, store, "x float, y int", values, parts=2, tensors={"x": "x", "y": "y"})
    assert (error.column, error.rows, error.found) == ("y", 10, "null")
    assert "10 of 40 rows" in str(error)


@pytest.mark.parametrize(("kind", "value"), [("float", 1.0), ("bigint", 2**60 + 1)])
def test_null_in_one_of_many_columns_of_a_type_is_reported_with_its_column_and_row(spark, store, kind, value):
    rows = [[value] * 6 for _ in range(9)]
    rows[7][4] = rows[5][4] = None
    schema = ", ".join(f"n{index} {kind}" for index in range(6))
    error = refused(spark, store, schema, rows, tensors={"x": [f"n{index}" for index in range(6)]})
    assert (error.column, error.rows, error.found) == ("n4", 2, "null")
    assert "the first is row 5 of partition 0" in str(error)


def test_vectors_of_different_sizes_are_reported(spark, store):
    schema = T.StructType([T.StructField("x", VectorUDT())])
    for other in (Vectors.dense([1, 2, 3]), Vectors.sparse(3, [1], [1.0])):
        error = refused(spark, store, schema, [(Vectors.dense([1, 2]),), (other,)])
        assert_matches("1 of 2 .* arrays of 3 .*expected arrays of 2 as in the first row", str(error))


@pytest.mark.parametrize(
    ("sql", "tensors", "options", "complaint"),
    [
        ("1 price", {"x": "pice"}, {}, r"column 'pice' is not a column .* did you mean 'price'\?"),
        ("1 x, 2 X", {"x": "x"}, {}, r"column 'x' stands for 2 columns of the DataFrame, \['x', 'X'\]"),
        ("1 price", {"x": "price"}, {"validation": "is_val"}, "column 'is_val' is not a column"),
        ("1 x, 2 v", {"x": "x"}, {"validation": "v"}, "validation column 'v' is int; it must be boolean"),
        ("map('a', 1) x", {"x": "x"}, {}, "map<string,int>, which cannot be stored; take the values"),
        ("named_struct('a', 1) x", {"x": "x"}, {}, r"struct<a:int>, which cannot be stored; select its fields"),
        ("null x", {"x": "x"}, {}, "of type void, which cannot be stored; give the column a type"),
        ("array('a') x", {"x": "x"}, {}, "array<string>, which cannot be stored; turn the elements into numbers"),
        ("interval '1' year x", {"x": "x"}, {}, "interval year, which cannot be stored; cast it to a number of months"),
        ("1 x, 'a' y", {"t": ["x", "y"]}, {}, "tensor 't': column 'y' is of variable length .* a tensor of its own"),
        ("1 x", {"x": "x"}, {"variable": ["x"]}, "variable length is for binary, string and array columns, and 'x' is"),
    ],
)
def test_columns_are_checked_before_anything_runs(spark, store, sql, tensors, options, complaint):
    frame = spark.sql(f"select {sql}")
    with pytest.raises(DataError, match=complaint):
        materialize(frame, tensors, store=store, **options)
    assert not store.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtypes": {"y": "int8"}}, "dtypes names 'y', which is not a tensor; the tensors are x"),
        ({"dtypes": {"x": "floaty"}}, "'floaty' is not a dtype of numpy"),
        ({"shapes": {"xs": (1,)}}, r"shapes names 'xs', which is not a tensor; did you mean 'x'\?"),
        ({"pad_to": {"x": 0}}, "pad_to of 'x' must be at least 1"),
        ({"pad_to": {"x": 3}}, "pad_to is for tensors of one array or binary column"),
        ({"sparse": {"x": True}}, "is not a vector"),
        ({"validation": 1.0}, "a fraction between 0 and 1, or a boolean column"),
        ({"shard_bytes": 5}, "shard_bytes must be at least 4096"),
        ({"pre_shuffle": "python"}, "pre_shuffle must be None or 'spark'"),
        ({"dataset_id": "../up"}, "dataset_id must be letters"),
        ({"tensors": {}}, "needs at least one column"),
    ],
)
def test_invalid_settings_are_reported(spark, store, options, complaint):
    with pytest.raises(InvalidSettingsError, match=complaint):
        materialize(spark.range(3), **{"tensors": {"x": "id"}, "store": store, **options})


def test_streaming_dataframe_is_refused(spark, store):
    with pytest.raises(DataError, match="a streaming DataFrame cannot be materialised"):
        materialize(spark.readStream.format("rate").load(), {"x": "value"}, store=store)


def test_error_of_the_query_is_reported(spark, store):
    frame = spark.range(3).select(F.raise_error(F.lit("the sensor is off")).cast("int").alias("x"))
    with pytest.raises(DataError, match=r"the rows could not be written: .*the sensor is off") as caught:
        materialize(frame, {"x": "x"}, store=store)
    assert "\tat " not in str(caught.value)


def test_read_only_store_is_reported(spark, tmp_path):
    place = tmp_path / "store"
    (place / DATASETS).mkdir(parents=True)
    frame = spark.range(3)
    blocked = place / DATASETS / "mine"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=r"the driver cannot write to .*/mine"):
        materialize(frame, {"x": "id"}, store=place, dataset_id="mine")


def test_store_that_executors_do_not_see_is_reported(spark):
    pytest.importorskip("fsspec")
    complaint = r"do not share memory://sets: .* does not see the driver's file\. Name a store .*hdfs://"
    with pytest.raises(StoreError, match=complaint):
        materialize(spark.range(3), {"x": "id"}, store="memory://sets")
