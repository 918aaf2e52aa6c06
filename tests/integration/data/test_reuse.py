"""The same rows are written once; other rows, other settings and damaged datasets are written again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from pyspark.sql import functions as F

from spark_elastic.data import catalog, materialization
from spark_elastic.data.catalog import DATASETS, clear_cache, delete_temporary
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.data.materialization import materialize
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError
from tests.integration.data.conftest import Rows
from tests.integration.processes import wait_until

ROOT = Path(__file__).resolve().parents[3]
X = {"x": "x"}


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    """A Parquet table of 100 rows: x, v."""
    path = str(tmp_path_factory.mktemp("table") / "t")
    spark.range(0, 100, 1, 2).select(F.col("id").alias("x"), (F.col("id") % 5 == 0).alias("v")).write.parquet(path)
    return path


def where(dataset):
    return dataset.store.url


def test_the_same_query_is_written_once(spark, store, table):
    query = lambda: spark.read.parquet(table).filter("x > 10").select((F.col("x") * 2).alias("x"))  # noqa: E731
    first = materialize(query(), X, store=store)
    assert materialize(query(), X, store=store) == first
    assert len(store.list(DATASETS)) == 1


def test_changes_of_rows_or_settings_are_written_again(spark, store, table):
    frame = spark.read.parquet(table)
    sets = [
        materialize(frame, X, store=store),
        materialize(frame.filter("x > 10"), X, store=store),
        materialize(frame.filter("x > 11"), X, store=store),
        materialize(frame, {"y": "x"}, store=store),
        materialize(frame, {"x": ["x"]}, store=store),
        materialize(frame, X, store=store, dtypes={"x": "float32"}),
        materialize(frame, X, store=store, validation=0.5),
        materialize(frame, X, store=store, validation=0.5, seed=1),
        materialize(frame, X, store=store, validation="v"),
        materialize(frame, X, store=store, pre_shuffle="spark"),
    ]
    assert len(set(map(where, sets))) == len(sets)


def test_changes_of_unread_columns_are_ignored(spark, store, table):
    frame = spark.read.parquet(table)
    first = materialize(frame, X, store=store)
    assert materialize(frame.withColumn("more", F.lit(1)), X, store=store).store == first.store


def test_changed_files_are_written_again(spark, store, tmp_path):
    path = str(tmp_path / "t")
    spark.range(10).write.parquet(path)
    first = materialize(spark.read.parquet(path), {"x": "id"}, store=store)
    spark.range(20).write.mode("overwrite").parquet(path)
    second = materialize(spark.read.parquet(path), {"x": "id"}, store=store)
    assert (first.rows(), second.rows()) == (10, 20)
    spark.range(5).write.mode("append").parquet(path)
    assert materialize(spark.read.parquet(path), {"x": "id"}, store=store).rows() == 25


def test_rows_in_spark_memory_are_reused_within_the_session(spark, store):
    frame = spark.createDataFrame(spark.sparkContext.parallelize([(1,), (2,)], 1), "x int")
    other = spark.createDataFrame(spark.sparkContext.parallelize([(1,), (3,)], 1), "x int")
    first = materialize(frame, X, store=store)
    assert materialize(frame, X, store=store).store == first.store
    assert Rows(materialize(other, X, store=store))["x"].tolist() == [1, 3]


def test_a_query_that_is_not_deterministic_is_written_each_time(spark, store):
    frame = spark.range(50).select(F.rand().alias("x"))
    assert materialize(frame, X, store=store).store != materialize(frame, X, store=store).store
    now = spark.range(2).select(F.unix_micros(F.current_timestamp()).alias("x"))
    assert materialize(now, X, store=store).store != materialize(now, X, store=store).store


def test_cached_query_that_is_not_deterministic_is_reused(spark, store):
    frame = spark.range(50).select(F.rand().alias("x")).cache()
    try:
        first = materialize(frame.filter("x < 0.5"), X, store=store)
        assert materialize(frame.filter("x < 0.5"), X, store=store).store == first.store
        assert materialize(frame.filter("x >= 0.5"), X, store=store).rows() + first.rows() == 50
    finally:
        frame.unpersist(blocking=True)


def test_different_user_functions_are_distinguished(spark, store):
    double, triple = (F.udf(lambda x, by=by: x * by, "long") for by in (2, 3))
    frame = spark.range(1, 3)
    first = materialize(frame.select(double("id").alias("x")), X, store=store)
    assert materialize(frame.select(double("id").alias("x")), X, store=store).store == first.store
    second = materialize(frame.select(triple("id").alias("x")), X, store=store)
    assert sorted(Rows(first)["x"].tolist()) == [2, 4]
    assert sorted(Rows(second)["x"].tolist()) == [3, 6]


def program(folder):
    """Return the output of `reuse_program`, another program with queries on these tables."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.data.reuse_program", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kept_dataset_is_reused_by_another_program_for_the_same_query_only(spark, tmp_path):
    frame = spark.range(0, 100, 1, 2).select(F.col("id").alias("x"), (F.col("id") % 5).cast("double").alias("v"))
    for name in ("table", "other"):
        frame.write.parquet(str(tmp_path / name))
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("x,text\n1,a\n")
    first, second = program(tmp_path), program(tmp_path)
    assert first["set"] == second["set"]
    assert first["rows"] == 89
    same = [name for name, key in first["keys"].items() if key is not None and key == second["keys"][name]]
    assert same == [name for name in first["keys"] if not name.startswith(("session: ", "never: "))]
    assert [name for name, key in first["keys"].items() if key is None] == [n for n in first["keys"] if "never" in n]
    known = [key for key in first["keys"].values() if key is not None]
    assert len(set(known)) == len(known), "queries that differ are told apart within a program"


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
    first = materialize(frame, X, store=store)
    first.store.delete(MANIFEST_NAME)
    second = materialize(frame, X, store=store)
    assert second.rows() == 100
    assert {shard.file for shard in second.manifest.splits["train"]}.isdisjoint(
        shard.file for shard in first.manifest.splits["train"]
    )


def test_damaged_dataset_is_written_again_or_refused_if_it_has_a_name(spark, store, table):
    frame = spark.read.parquet(table)
    for options in ({}, {"dataset_id": "mine"}):
        dataset = materialize(frame, X, store=store, **options)
        file = dataset.manifest.splits["train"][0].file
        dataset.store.write_bytes(file, dataset.store.read_bytes(file)[:-8])
        if not options:
            assert len(Rows(materialize(frame, X, store=store))["x"]) == 100
        else:
            with pytest.raises(DatasetError, match="the dataset is damaged"):
                materialize(frame, X, store=store, **options)


def test_dataset_not_synced_to_the_disk_is_verified(spark, store, table, monkeypatch):
    frame = spark.read.parquet(table)
    dataset = materialize(frame, X, store=store)
    for shard in dataset.manifest.splits["train"]:
        dataset.store.write_bytes(shard.file, bytes(shard.nbytes))  # as after a power cut
    monkeypatch.setattr(catalog, "_temporary", {})  # another process looks
    assert Rows(materialize(frame, X, store=store))["x"].sum() == 99 * 50


def test_foreign_dataset_under_the_right_name_is_not_trusted(spark, store, table):
    frame = spark.read.parquet(table)
    ours, other = materialize(frame, X, store=store), materialize(frame.limit(3), X, store=store)
    ours.store.write_bytes(MANIFEST_NAME, other.store.read_bytes(MANIFEST_NAME))
    for shard in other.manifest.splits["train"]:
        ours.store.write_bytes(shard.file, other.store.read_bytes(shard.file))
    assert Dataset.open(ours.store).rows() == 3
    assert materialize(frame, X, store=store).rows() == 100


def test_remote_store_can_be_used(spark, table, tmp_path):
    """A store like an object store, opened by its own filesystem; the tasks see it too."""
    remote = fsspec.filesystem("dir", path=str(tmp_path), target_protocol="file")
    store = Store.of(remote, "far/away")
    assert not store.is_local
    tensors = {"x": "x", "text": "text"}
    frame = spark.read.parquet(table).withColumn("text", F.hex("x"))
    dataset = materialize(frame, tensors, store=store, validation="v")
    assert sorted(Rows(dataset, "validation")["x"]) == list(range(0, 100, 5))
    assert sorted(Rows(dataset)["text"]) == sorted(b"%X" % x for x in range(100) if x % 5)
    assert materialize(frame, tensors, store=store, validation="v").manifest == dataset.manifest
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
        materialize(frame, X, store=store, reuse=False)
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


def test_concurrent_fits_write_once(spark, store, table):
    frame, found = spark.read.parquet(table), []
    threads = [
        threading.Thread(target=lambda: found.append(materialize(frame, X, store=store).manifest)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4


def test_one_of_two_concurrent_writers_commits_and_both_read_it(spark, store, table):
    """The other process is simulated by a dataset that is committed while ours is being written."""
    frame = spark.read.parquet(table)
    theirs = materialize(frame, X, store=store)
    text = theirs.store.read_bytes(MANIFEST_NAME)
    theirs.store.delete(MANIFEST_NAME)
    url = theirs.store.url

    @F.udf("long")
    def commit_meanwhile(x):
        from spark_elastic.data.store import Store

        Store.create(url).write_bytes(MANIFEST_NAME, text)
        return x

    from spark_elastic.data import materialization as module

    request = module.Request(X, {}, {}, {}, (), {}, False, None, 0, 1 << 20, None)
    racing = frame.select(commit_meanwhile("x").alias("x"))
    ours = module._write(racing, request, theirs.store, theirs.manifest.key, False, 0, findable=True)
    assert ours.manifest == theirs.manifest
    runs = {entry.path for entry in ours.store.list() if entry.is_dir} - {"leases"}
    assert len(runs) == 1  # the slower write left nothing


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


def test_dataset_that_another_fit_reads_stays(spark, store, table):
    dataset = materialize(spark.read.parquet(table), X, store=store)
    with dataset.lease():
        delete_temporary()
        assert clear_cache(store) == []
        assert Dataset.open(dataset.store) == dataset
    assert clear_cache(store) == [dataset.store.url.rpartition("/")[2]]
    assert store.list(DATASETS) == []


def test_dataset_being_looked_up_is_not_deleted_by_a_fit_that_ends(spark, store, table, monkeypatch):
    query = spark.read.parquet(table)
    first = materialize(query, X, store=store)
    catalog.give_back(first.store, catalog.Limits(nbytes=1 << 30), 0.0)
    find = materialization._find

    def find_and_wait(*asked):
        found = find(*asked)
        assert catalog.collect_temporary(catalog.Limits(nbytes=0), time.time()) == []
        return found

    monkeypatch.setattr(materialization, "_find", find_and_wait)
    assert len(Rows(materialize(query, X, store=store))["x"]) == 100


def test_validation_share_is_drawn_by_the_seed(spark, store):
    frame = spark.range(0, 20_000, 1, 4)
    sets = [materialize(frame, {"x": "id"}, store=store, validation=0.1, seed=seed, reuse=False) for seed in (0, 0, 1)]
    drawn = []
    for dataset in sets:
        train, aside = Rows(dataset)["x"], Rows(dataset, "validation")["x"]
        assert sorted([*train, *aside]) == list(range(20_000))
        assert abs(len(aside) / 2_000 - 1) < 0.1
        assert abs(np.corrcoef(np.sort(aside), np.arange(len(aside)))[0, 1]) > 0.999  # spread evenly over all rows
        drawn.append(set(aside))
    assert drawn[0] == drawn[1]
    assert len(drawn[0] & drawn[2]) < 400


def test_validation_rows_can_be_chosen_by_a_column(spark, store, table):
    dataset = materialize(spark.read.parquet(table), X, store=store, validation="v")
    assert sorted(Rows(dataset, "validation")["x"]) == list(range(0, 100, 5))
    assert sorted(Rows(dataset)["x"]) == [x for x in range(100) if x % 5]


def test_rows_can_be_shuffled_by_spark_first(spark, store):
    frame = spark.range(0, 10_000, 1, 4)
    stored = Rows(materialize(frame, {"x": "id"}, store=store, pre_shuffle="spark"))["x"]
    assert sorted(stored) == list(range(10_000))
    assert abs(np.corrcoef(stored, np.arange(10_000))[0, 1]) < 0.05
    neighbours = np.abs(np.diff(stored.astype(np.int64)))
    assert abs(neighbours.mean() / (10_000 / 3) - 1) < 0.05  # as in a random order
