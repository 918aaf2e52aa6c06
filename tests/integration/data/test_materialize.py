"""Rows are written by each call, unless a dataset_id finds them; what is written, what is deleted, and when."""

import os
import signal
import threading

import fsspec
import numpy as np
import pytest
from pyspark.sql import functions as F

from spark_elastic.data import catalog
from spark_elastic.data.catalog import DATASETS, delete_temporary
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.data.materialization import materialize
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError
from tests.integration.data.conftest import Rows
from tests.integration.processes import wait_until

X = {"x": "x"}


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    """A Parquet table of 100 rows: x, v."""
    path = str(tmp_path_factory.mktemp("table") / "t")
    spark.range(0, 100, 1, 2).select(F.col("id").alias("x"), (F.col("id") % 5 == 0).alias("v")).write.parquet(path)
    return path


@pytest.mark.nightly
def test_rows_are_written_again_where_the_plan_cannot_show_a_change(spark, store, tmp_path):
    """Behind an RDD, mapInPandas or a UDF, Spark reads a file that its plan does not name."""
    file = tmp_path / "slope"

    def slope(_=None):
        return int(file.read_text())

    def pandas(frames):
        for frame in frames:
            yield frame * slope()

    frames = [
        spark.createDataFrame(spark.sparkContext.parallelize([1], 1).map(lambda x: (x * slope(),)), "x long"),
        spark.range(1, 2).select(F.udf(slope, "long")("id").alias("x")),
        spark.range(1, 2).mapInPandas(pandas, "id long").withColumnRenamed("id", "x"),
    ]
    for value in (2, -3):
        file.write_text(str(value))
        assert [Rows(materialize(frame, X, store=store))["x"].tolist() for frame in frames] == [[value]] * 3


def test_dataset_id_finds_the_dataset_even_if_the_query_changed(spark, store):
    first = materialize(spark.range(10), {"x": "id"}, store=store, dataset_id="mine")
    again = materialize(spark.range(99), {"x": "id"}, store=store, dataset_id="mine")
    assert again == first
    assert again.rows() == 10


def test_dataset_id_with_other_settings_is_refused(spark, store):
    materialize(spark.range(10), {"x": "id"}, store=store, dataset_id="mine")
    with pytest.raises(DatasetError, match=r"'mine' .* other settings: validation=None, not 0\.5; choose another"):
        materialize(spark.range(10), {"x": "id"}, store=store, dataset_id="mine", validation=0.5)


def test_unfinished_dataset_is_written_again(spark, store, table):
    frame = spark.read.parquet(table)
    first = materialize(frame, X, store=store, dataset_id="mine")
    first.store.delete(MANIFEST_NAME)
    second = materialize(frame, X, store=store, dataset_id="mine")
    assert second.rows() == 100
    assert {shard.file for shard in second.manifest.splits["train"]}.isdisjoint(
        shard.file for shard in first.manifest.splits["train"]
    )


def test_dataset_not_synced_to_the_disk_is_verified(spark, store, table, monkeypatch):
    frame = spark.read.parquet(table)
    named = {"dataset_id": "passing", "keep": False}
    dataset = materialize(frame, X, store=store, **named)
    for shard in dataset.manifest.splits["train"]:
        dataset.store.write_bytes(shard.file, bytes(shard.nbytes))  # as after a power cut
    monkeypatch.setattr(catalog, "_temporary", {})  # another process looks
    with pytest.raises(DatasetError, match="the dataset is damaged"):
        materialize(frame, X, store=store, **named)


def test_remote_store_can_be_used(spark, table, tmp_path):
    """A store like an object store, opened by its own filesystem; the tasks see it too."""
    remote = fsspec.filesystem("dir", path=str(tmp_path), target_protocol="file")
    store = Store.of(remote, "far/away")
    assert not store.is_local
    tensors = {"x": "x", "text": "text"}
    frame = spark.read.parquet(table).withColumn("text", F.hex("x"))
    named = {"dataset_id": "passing", "keep": False, "validation": "v"}
    dataset = materialize(frame, tensors, store=store, **named)
    assert sorted(Rows(dataset, "validation")["x"]) == list(range(0, 100, 5))
    assert sorted(Rows(dataset)["text"]) == sorted(b"%X" % x for x in range(100) if x % 5)
    assert materialize(frame, tensors, store=store, **named).manifest == dataset.manifest
    dataset.verify()
    delete_temporary()
    assert store.list(DATASETS) == []


def test_session_settings_are_restored(spark, store):
    name = "spark.sql.execution.arrow.maxBytesPerBatch"
    is_set = lambda: spark._jsparkSession.sessionState().conf().contains(name)  # noqa: E731
    frame = spark.range(5).select(F.array("id").alias("x"))
    materialize(frame, X, store=store)
    assert not is_set()
    spark.conf.set(name, "5000000")
    try:
        materialize(frame, X, store=store)
        assert spark.conf.get(name).rstrip("b") == "5000000"
    finally:
        spark.conf.unset(name)


def test_ctrl_c_ends_the_job_and_leaves_nothing(spark, store, tmp_path):
    started, over = tmp_path / "started", tmp_path / "over"

    @F.udf("long")
    def holds(x):
        started.touch()
        wait_until(over.exists, 60, "the test is over")
        return x

    def interrupt():
        wait_until(started.exists, 60, "a task runs")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        materialize(spark.range(2).select(holds("id").alias("x")), X, store=store)
    thread.join()
    tracker = spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), 20, "no job runs")
    over.touch()
    assert [entry for entry in store.list(recursive=True) if not entry.is_dir] == []
    assert materialize(spark.range(2), {"x": "id"}, store=store).rows() == 2  # the session still works


@pytest.mark.nightly
def test_concurrent_fits_on_one_dataset_id_write_once(spark, store, table):
    frame, found = spark.read.parquet(table), []
    threads = [
        threading.Thread(target=lambda: found.append(materialize(frame, X, store=store, dataset_id="mine").manifest))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4


def test_datasets_are_deleted_at_exit_unless_kept(spark, store, table):
    frame = spark.read.parquet(table)
    gone = materialize(frame, X, store=store)
    kept = [
        materialize(frame.limit(5), X, store=store, keep=True),
        materialize(frame, X, store=store, dataset_id="mine"),
    ]
    passing = materialize(frame, X, store=store, dataset_id="passing", keep=False)
    delete_temporary()
    assert not gone.store.exists()
    assert not passing.store.exists()
    assert [Dataset.open(dataset.store) for dataset in kept] == kept


def test_validation_share_is_drawn_by_the_seed(spark, store):
    frame = spark.range(0, 20_000, 1, 4)
    sets = [materialize(frame, {"x": "id"}, store=store, validation=0.1, seed=seed) for seed in (0, 0, 1)]
    drawn = []
    for dataset in sets:
        train, aside = Rows(dataset)["x"], Rows(dataset, "validation")["x"]
        assert sorted([*train, *aside]) == list(range(20_000))
        assert abs(len(aside) / 2_000 - 1) < 0.1
        assert abs(np.corrcoef(np.sort(aside), np.arange(len(aside)))[0, 1]) > 0.999  # spread evenly over all rows
        drawn.append(set(aside))
    assert drawn[0] == drawn[1]
    assert len(drawn[0] & drawn[2]) < 400


def test_rows_can_be_shuffled_by_spark_first(spark, store):
    frame = spark.range(0, 10_000, 1, 4)
    stored = Rows(materialize(frame, {"x": "id"}, store=store, pre_shuffle="spark"))["x"]
    assert sorted(stored) == list(range(10_000))
    assert abs(np.corrcoef(stored, np.arange(10_000))[0, 1]) < 0.05
    neighbours = np.abs(np.diff(stored.astype(np.int64)))
    assert abs(neighbours.mean() / (10_000 / 3) - 1) < 0.05  # as in a random order
