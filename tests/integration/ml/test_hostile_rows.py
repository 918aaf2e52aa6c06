"""Hostile data: a fit and a `transform` have a defined result, or end early with an error that names what is wrong.

The table in docs/reliability.md says of each kind what happens. What types are stored, and all that `materialize`
itself refuses, is in `tests/integration/data`; here are the estimators, which have to say it as clearly.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from spark_elastic import LocalLauncher
from spark_elastic.data.catalog import DATASETS
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError, StoreError, UsageError
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.session import cluster_of
from tests.integration.data.conftest import Rows
from tests.nightly import by_night

ROOT = Path(__file__).resolve().parents[3]
ROWS = 12
HUGE = 100_000_000
TOO_LONG = 1500
"""Characters of an error: two sentences for a column, and advice."""
FRAME_OF_JAVA = re.compile(r"\n\tat |Traceback|Driver stacktrace")


@pytest.fixture(scope="module", params=by_night(["torch", "keras"], but=["torch"]))
def here(request: pytest.FixtureRequest) -> ModuleType:
    """The estimators of a framework that train in this process."""
    if request.param == "torch":
        from tests.unit.ml.torch import estimators
    else:
        pytest.importorskip("tensorflow")
        from tests.unit.ml.keras import estimators  # type: ignore[no-redef]
    return estimators


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def rows(spark: Any) -> Any:
    """Return a DataFrame of ROWS rows in two partitions: a and b to train on, y of three classes, x of a and b."""
    a, b = F.col("id").cast("float"), (F.col("id") * 2).cast("float")
    table = spark.range(0, ROWS, 1, 2).select(a.alias("a"), b.alias("b"), (F.col("id") % 3).alias("y"))
    return table.withColumn("x", F.array("a", "b"))


def small_net(here: ModuleType) -> Any:
    """Return a model from two numbers to three classes."""
    if here.__name__.endswith("torch.estimators"):
        from torch import nn

        return nn.Linear(2, 3)
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


def estimator(here: ModuleType, store: Path, **settings: Any) -> Any:
    net = small_net(here)
    common = {"model": net, "feature_cols": ["a", "b"], "label_cols": ["y"], "epochs": 1, "store": str(store)}
    return here.HereEstimator(**here.settings(**{**common, **settings}))


def files(store: Path) -> set[Path]:
    """Return the files of datasets. Without its manifest, what a task has left that was still at work is none."""
    return {path for found in store.rglob("manifest.json") for path in found.parent.rglob("*") if path.is_file()}


def refused(fit: Callable[[], Any], complaint: str, store: Path, kind: type[UsageError] = DataError) -> None:
    """Check that it raises a clear error, and leaves no dataset in the store."""
    before = files(store)
    with pytest.raises(kind) as caught:
        fit()
    said = str(caught.value)
    assert re.search(complaint, said, re.DOTALL), said
    assert not FRAME_OF_JAVA.search(said), said
    assert len(said) < TOO_LONG, said
    assert files(store) == before


X = {"feature_cols": ["x"]}
VALUES = {
    "a null": ("a", "if(a = 3, null, a)", {}, "column 'a': 1 of 12 .* null .*na.fill"),
    "a null in the label": ("y", "if(a = 3, null, y)", {}, "column 'y': 1 of 12 .* null .*na.fill"),
    "NaN in a label of classes": ("y", "if(a = 3, double('nan'), y)", {}, "column 'y': 1 of 12 .* NaN or infinity"),
    "a class with a fraction": ("y", "y + 0.5D", {}, "column 'y': 12 of 12 .* such as 0.5 .* what int64 can hold"),
    "a null in the validation column": (
        *("v", "if(a = 3, null, a > 5)", {"validation": "v"}),
        "column 'v': 1 of 12 .* null .* true or false in every row.*na.fill",
    ),
    "ragged arrays": ("x", "if(a = 3, array(a), x)", X, "column 'x': 1 of 12 .* arrays of 1 .*arrays of 2.*pad_to"),
    "arrays ragged by partition": ("x", "if(a < 6, array(a), x)", X, "'x': 6 of 12 .* most partitions.*pad_to"),
    "wider than declared": ("x", "array(a, b, a)", {**X, "input_shapes": [[2]]}, r"'x': 12 of 12 .* 3 values .* \[2\]"),
    "a number that float32 rounds": ("a", "bigint(16777217)", {}, "column 'a': 12 of 12 .* 16777217 .* exactly"),
    "a timestamp among floats": ("a", "timestamp'2020-01-01 00:00:00'", {}, "column 'a': 12 of 12 .* exactly"),
}
SCHEMA = {
    "structs in an array": ("a", "array(named_struct('k', 1))", {}, "column 'a' .* select its fields"),
    "a struct as label": ("y", "named_struct('k', 1)", {}, "column 'y' .* select its fields"),
    "text": ("a", "'text'", {}, "feature_cols 'a' is string, which a model cannot take"),
    "text as label": ("y", "'text'", {}, "label_cols 'y' is string, .*StringIndexer"),
    "bytes": ("a", "cast('text' as binary)", {}, "feature_cols 'a' is binary, which a model cannot take"),
    "text as weight": ("w", "'text'", {"sample_weight_col": "w"}, "sample_weight_col 'w' is string"),
    "a name that is no text": ("a", "a", {"feature_cols": ["\ud800", "b"]}, "is not a column of the DataFrame"),
    "a name in other letters": ("c", "a", {"feature_cols": ["A", "b"]}, "'A' is not a column"),
}


OF_LABELS = ("a null in the label", "NaN in a label of classes", "a class with a fraction", "wider than declared")
"""Columns that a framework has to do with; all others are the same code for both."""
SAME_FOR_BOTH = pytest.mark.parametrize("here", ["torch"], indirect=True)


@pytest.mark.parametrize(
    ("here", "kind"),
    [
        *by_night([("torch", kind) for kind in (*VALUES, *SCHEMA)], but=[("torch", kind) for kind in OF_LABELS]),
        *by_night([("keras", kind) for kind in OF_LABELS]),
    ],
    indirect=["here"],
)
def test_column_that_cannot_be_trained_on_is_named(here: ModuleType, spark: Any, store: Path, kind: str) -> None:
    name, sql, settings, complaint = {**VALUES, **SCHEMA}[kind]
    hostile = rows(spark).withColumn(name, F.expr(sql))
    refused(lambda: estimator(here, store, **settings).fit(hostile), complaint, store)


@SAME_FOR_BOTH
def test_frames_that_cannot_be_trained_on_are_refused(here: ModuleType, spark: Any, store: Path) -> None:
    good, plain = rows(spark), estimator(here, store)
    refused(lambda: plain.fit(good.where("a < 0")), "the DataFrame has no rows", store)
    refused(lambda: plain.fit(good.select()), "'a' is not a column of the DataFrame", store)
    refused(lambda: plain.fit(good.select("a", "a", "b", "y")), r"'a' stands for 2 columns .*rename all but one", store)
    halves = estimator(here, store, validation=0.5)
    refused(lambda: halves.fit(good.where("a = 1")), "leaves no row for the split '.*', of 1 rows", store)
    for wrong in (None, good.toPandas()):
        refused(lambda: plain.fit(wrong), "needs a Spark DataFrame", store, InvalidSettingsError)  # noqa: B023
    twice = lambda: estimator(here, store, feature_cols=["a", "a"]).fit(good)  # noqa: E731
    refused(twice, "feature_cols names a more than once", store, InvalidSettingsError)


FUNCTIONS: dict[str, tuple[Callable[[float], Any], str]] = {
    "returns another type": (lambda a: "text", "the rows could not be written: .*text"),
    "ends its process": (lambda a: os._exit(3) if a == 7 else a, "a Python process of Spark ended .*memory"),
    "exits": (lambda a: sys.exit(3) if a == 7 else a, "SystemExit: 3"),
}


@pytest.mark.parametrize("kind", by_night(FUNCTIONS, but=["ends its process"]))
def test_function_of_the_query_that_fails_halfway_is_reported(spark: Any, store: Path, kind: str) -> None:
    from tests.unit.ml.torch import estimators

    function, complaint = FUNCTIONS[kind]
    hostile = rows(spark).withColumn("a", F.udf(function, "float")("a"))
    refused(lambda: estimator(estimators, store).fit(hostile), complaint, store)


def test_table_that_is_damaged_or_gone_is_reported(spark: Any, store: Path, tmp_path: Path) -> None:
    from tests.unit.ml.torch import estimators

    path = tmp_path / "table"
    rows(spark).write.parquet(str(path))
    table = spark.read.parquet(str(path))
    for part in path.glob("part-*"):
        part.write_bytes(part.read_bytes()[:-30])
        part.with_name(f".{part.name}.crc").unlink()
    refused(lambda: estimator(estimators, store).fit(table), "not a Parquet file", store)
    shutil.rmtree(path)
    refused(lambda: estimator(estimators, store).fit(table), "does not exist", store)


@pytest.mark.parametrize(
    ("name", "sql", "settings", "complaint"),
    [
        ("x", "array(a, b, a)", X, r"features_0 float32 \[4, 3\]"),
        ("a", "a", {"feature_cols": ["a"]}, r"features_0 float32 \[4, 1\]"),
        ("y", "if(a = 1, 7, y)", {}, "label.* 7 .*"),
        ("y", "if(a = 1, -1, y)", {}, "label.* -1 .*"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(
    here: ModuleType, spark: Any, store: Path, name: str, sql: str, settings: dict[str, Any], complaint: str
) -> None:
    made = estimator(here, store, **settings)
    with pytest.raises(DataError, match=r"cannot deal with the first (4|12) rows") as caught:
        made.fit(rows(spark).withColumn(name, F.expr(sql)))
    assert re.search(complaint, str(caught.value), re.DOTALL), caught.value
    assert not hasattr(made, "training")


def read_back(made: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and labels that a fit trained on, in the order of the rows."""
    stored = Rows(made.training.dataset)
    return stored["features_0"], stored["label_0"]


ACCEPTED = {
    "decimals": ({"a": "cast(a as decimal(38, 18))", "y": "cast(y as decimal(9, 0))"}, {}),
    "dates and spans of time": ({"a": "date_add(date'1970-01-01', int(a))", "b": "make_dt_interval(0, 0, 0, 0)"}, {}),
    "booleans": ({"a": "a > 3", "y": "y > 1"}, {}),
    "weights of zero and below": ({"w": "if(a > 5, 0, -a)"}, {"sample_weight_col": "w"}),
    "whole numbers": ({"a": "bigint(a)", "b": "tinyint(b)"}, {}),
    "odd names": ({"Größe .`x`": "a", "🦆\n": "b"}, {"feature_cols": ["Größe .`x`", "🦆\n"]}),
    "columns that are not read and share a name": ({"z": "map('k', interval '1' year)", "Z": "1"}, {}),
}


@SAME_FOR_BOTH
@pytest.mark.parametrize("kind", by_night(ACCEPTED, but=["booleans", "weights of zero and below", "odd names"]))
def test_unusual_columns_are_trained_on_with_their_values(here: ModuleType, spark: Any, store: Path, kind: str) -> None:
    columns, settings = ACCEPTED[kind]
    frame = rows(spark)
    expressions = {**{name: name for name in frame.columns}, **columns}
    frame = frame.select(*(F.expr(sql).alias(name) for name, sql in expressions.items()))
    made = estimator(here, store, **settings, keep_dataset=True)
    assert made.fit(frame).history[0]["rows"] == ROWS
    features, labels = read_back(made)
    number = np.arange(ROWS)
    expected = {
        "booleans": np.stack([number > 3, 2 * number], 1),
        "dates and spans of time": np.stack([number, 0 * number], 1),
    }
    assert features.tolist() == expected.get(kind, np.stack([number, 2 * number], 1)).astype(float).tolist()
    assert labels.tolist() == (number % 3 > 1 if kind == "booleans" else number % 3).tolist()
    if "sample_weight_col" in settings:
        assert Rows(made.training.dataset)["sample_weight"].tolist() == np.where(number > 5, 0.0, -number).tolist()


def test_few_rows_and_partitions_without_rows_are_trained_on(here: ModuleType, spark: Any, store: Path) -> None:
    made = estimator(here, store)
    assert made.fit(rows(spark).where("a = 1")).history[0]["rows"] == 1
    assert made.fit(rows(spark).where("a < 3").repartition(5)).history[0]["rows"] == 3
    aside = estimator(here, store, validation="v").fit(rows(spark).where("a < 2").withColumn("v", F.col("a") == 0))
    assert aside.history[0]["rows"] == 1
    assert np.isfinite(aside.history[0]["val_loss"])


@SAME_FOR_BOTH
def test_rows_that_differ_at_each_try_are_those_of_one_try(here: ModuleType, spark: Any, store: Path) -> None:
    """Features, label and split of a row come from the same evaluation, and nothing is left in the end."""
    drawn = F.udf(lambda a: random.random(), "float").asNondeterministic()
    before = files(store)
    table = rows(spark).withColumn("a", drawn("a")).withColumn("b", F.rand()).withColumn("v", F.rand() < 0.5)
    history = estimator(here, store, validation="v", epochs=2).fit(table).history
    assert 0 < history[0]["rows"] < ROWS
    assert history[1]["rows"] == history[0]["rows"], "both epochs use the rows that were drawn once"
    assert files(store) == before


HUGE_CELL = f"""
import sys
import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from tests.unit.ml.torch import estimators
from torch import nn

def lengths(columns):
    size = np.array([len(text) for text in columns["features_0"]], np.float32)
    assert size.tolist() == [{HUGE}], size
    return {{**columns, "features_0": np.ones((1, 2), np.float32)}}

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.memory", "3g").getOrCreate()
rows = spark.range(1).select(F.expr("repeat('x', {HUGE})").alias("text"), F.col("id").alias("y"))
given = estimators.settings(model=nn.Linear(2, 3), feature_cols=["text"], label_cols=["y"], epochs=1, store=sys.argv[1])
print(estimators.HereEstimator(**given, transformation_fn=lengths).fit(rows).history[0]["rows"])
spark.stop()
"""


@pytest.mark.nightly
def test_cell_of_100_mb_is_trained_on(tmp_path: Path) -> None:
    """In a program of its own, whose JVM has the memory for it."""
    command = [sys.executable, "-c", HUGE_CELL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["1"], done.stderr[-3000:]


@SAME_FOR_BOTH
def test_fewer_rows_than_workers(here: ModuleType, spark: Any, store: Path) -> None:
    torch = here.__name__.endswith("torch.estimators")
    base = here.HereEstimator.__bases__[1]
    launcher = LocalLauncher(preimport=("torch" if torch else "tensorflow",))
    common = here.settings(model=small_net(here), feature_cols=["a", "b"], label_cols=["y"], store=str(store), epochs=2)
    made = base(**{**common, "num_proc": 2, "run_options": {"launcher": launcher}})
    assert [each["rows"] for each in made.fit(rows(spark).where("a = 1")).history] == [1, 1]


@SAME_FOR_BOTH
def test_source_that_changed_is_written_again_and_its_checkpoints_are_refused(
    here: ModuleType, spark: Any, store: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    given = {"checkpoint_dir": str(tmp_path / "runs"), "run_id": "one", "checkpoint_interval": 1}
    rows(spark).write.parquet(path)
    estimator(here, store, **given).fit(spark.read.parquet(path))
    rows(spark).withColumn("a", F.col("a") + 1).write.mode("overwrite").parquet(path)
    again = estimator(here, store, **given, epochs=2)
    with pytest.raises(CheckpointError, match=r"run_id='one' has checkpoints of other rows.*resume=False"):
        again.fit(spark.read.parquet(path))
    anew = estimator(here, store, **given, resume=False, keep_dataset=True)
    anew.fit(spark.read.parquet(path))
    assert sorted(read_back(anew)[0][:, 0].tolist()) == list(range(1, ROWS + 1))


# --- storage ------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "disk"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(at)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


def test_storage_that_is_full_is_reported_and_nothing_is_left(spark: Any, small_disk: Path) -> None:
    from tests.unit.ml.torch import estimators

    store = small_disk / "store"
    many = spark.range(0, 100_000, 1, 2).select(
        F.col("id").cast("float").alias("a"), F.rand(1).cast("float").alias("b"), (F.col("id") % 3).alias("y")
    )
    refused(lambda: estimator(estimators, store).fit(many), "No space left on device", store, StoreError)
    assert estimator(estimators, store).fit(many.limit(100)).history[0]["rows"] == 100


def test_storage_that_goes_while_rows_are_written_is_reported(spark: Any, tmp_path: Path) -> None:
    from tests.unit.ml.torch import estimators

    store = tmp_path / "store"
    where = str(store / DATASETS)

    def deleted_halfway(batches: Any) -> Any:
        for batch in batches:
            if list(Path(where).rglob("train-*")):  # the next step of the task has begun a file
                shutil.rmtree(where, ignore_errors=True)
            yield batch

    many = spark.range(0, 1_000_000, 1, 1).select(
        F.col("id").cast("float").alias("a"), F.rand(1).cast("float").alias("b"), (F.col("id") % 3).alias("y")
    )
    going = many.mapInArrow(deleted_halfway, many.schema)
    refused(
        lambda: estimator(estimators, store).fit(going), "the driver does not see it|No such file", store, StoreError
    )
    assert estimator(estimators, store).fit(rows(spark)).history[0]["rows"] == ROWS


# --- transform ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(here: ModuleType, spark: Any, store: Path) -> Any:
    return estimator(here, store).fit(rows(spark))


TYPES = {
    "text": ("a", "'text'", "column 'a' is of type string, and the model was trained on values of <f4; cast it"),
    "a map": ("a", "map('k', 1)", "column 'a' is of type map<string,int>, .*take the values"),
    "a struct": ("a", "named_struct('k', 1)", "column 'a' is of type struct<k:int>, .*select its fields"),
}
UNREAD = {
    "months that are not read": ("z", "array(interval '1' year)", "column 'z' .* intervals of months .*df.drop"),
    "a calendar's span": ("z", "make_interval(1, 2)", "column 'z' is of type interval, .* intervals of months"),
    "fields of one name": ("z", "map(1, named_struct('k', 1, 'k', 2))", "column 'z' .*several fields of one name"),
}


@SAME_FOR_BOTH
def test_transform_names_a_column_of_the_wrong_type(model: Any, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(cases: dict[str, tuple[str, str, str]]) -> None:
        for name, (column, sql, complaint) in cases.items():
            with pytest.raises(DataError, match=complaint) as early:
                model.transform(rows(spark).withColumn(column, F.expr(sql)))
            assert early.value.column == column, name

    refused(TYPES)
    if cluster_of(spark).has_arrow_udfs():
        for column, sql, _ in UNREAD.values():
            made = model.transform(rows(spark).withColumn(column, F.expr(sql)))
            assert made.where("z is not null").select("output").count() == rows(spark).count()
    monkeypatch.setattr(Cluster, "has_arrow_udfs", lambda cluster: False)
    refused({**TYPES, **UNREAD})


@SAME_FOR_BOTH
def test_transform_says_which_rows_are_wrong(model: Any, spark: Any) -> None:
    for value, complaint in (
        ("1e300D", "too large such as"),
        ("null", "have null .*handle_invalid='skip' leaves such"),
    ):
        with pytest.raises(PySparkException) as late:
            model.transform(rows(spark).withColumn("a", F.expr(f"if(a = 3, {value}, a)"))).collect()
        assert re.search(f"column 'a': 1 of .*{complaint}", str(late.value), re.DOTALL), late.value


@SAME_FOR_BOTH
def test_transform_of_unusual_rows_is_that_of_the_numbers(model: Any, spark: Any) -> None:
    plain = {row.a: row.output for row in model.transform(rows(spark)).collect()}
    odd = rows(spark).withColumn("m", F.expr("map('k', named_struct('f', array(interval '1' day)))"))
    odd = odd.withColumn("none", F.expr("null")).withColumn("bytes", F.expr("cast('text' as binary)"))
    odd = odd.withColumn("a", F.expr("cast(a as decimal(9, 2))")).withColumn("b", F.expr("bigint(b)"))
    made = model.transform(odd).collect()
    assert {float(row.a): row.output for row in made} == plain
    assert made[0].bytes == b"text"
    assert model.transform(rows(spark).where("a < 0")).collect() == []
    assert model.transform(rows(spark).where("a = 1").repartition(4)).count() == 1
    huge = rows(spark).where("a = 1").withColumn("text", F.expr(f"repeat('x', {HUGE // 5})"))
    assert model.transform(huge).select(F.length("text")).first()[0] == HUGE // 5
