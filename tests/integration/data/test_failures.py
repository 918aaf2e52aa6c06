"""If executors or Python workers die while they write, the dataset is correct and contains each row once."""

import os
import signal
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from spark_elastic.data.catalog import DATASETS
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.materialization import materialize
from spark_elastic.data.shared_store import PROBE, ensure_shared
from spark_elastic.errors import StoreError
from spark_elastic.spark.session import cluster_of
from tests.integration.clusters import local_cluster
from tests.integration.data.conftest import Rows
from tests.integration.processes import wait_until

ROWS = 40_000


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(2, 1, 1024) as cluster:
        cluster.sc.setLogLevel("OFF")
        yield cluster


def dies_once(folder, kill):
    """Return a function of a row that kills a process once, in the middle of a task's rows."""

    @F.udf("long")
    def passes(x):
        if x == ROWS // 2 + ROWS // 8:
            try:
                os.close(os.open(f"{folder}/died", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return x
            kill()
        return x

    return passes


def kill_executor():
    pid = os.getpid()
    while b"ExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_task_that_dies_while_it_writes_is_repeated_and_counts_once(cluster, store, tmp_path):
    frame = cluster.spark.range(0, ROWS, 1, 4).select(dies_once(tmp_path, kill_executor)("id").alias("x"))
    dataset = materialize(frame, {"x": "x"}, store=store, validation=0.2)
    assert (tmp_path / "died").exists()
    train, aside = Rows(dataset)["x"], Rows(dataset, "validation")["x"]
    assert sorted([*train, *aside]) == list(range(ROWS))
    assert Dataset.open(dataset.store) == dataset
    listed = {shard.file for split in dataset.splits for shard in dataset.manifest.splits[split]}
    stored = {entry.path for entry in dataset.store.list(recursive=True) if entry.path.endswith(".rows")}
    assert stored == listed  # the files of the dead attempt are deleted
    wait_until(lambda: len(cluster.executors()) == 2, 60, "the executor is back")


@pytest.mark.nightly
def test_shared_store_passes_the_check(cluster, store):
    ensure_shared(store, cluster_of(cluster.sc))
    assert not [entry for entry in store.list() if entry.path.startswith(PROBE)]
    assert store.list(DATASETS) == []


@pytest.mark.nightly
def test_executors_that_see_another_folder_are_reported_before_anything_is_written(cluster, tmp_path, monkeypatch):
    """The store is /proc/self/cwd, which is another folder in each process."""
    monkeypatch.chdir(tmp_path)
    place = "/proc/self/cwd/store"
    with pytest.raises(
        StoreError, match=r"do not share /proc/self/cwd/store: .* does not see the driver's file.*store="
    ):
        materialize(cluster.spark.range(3), {"x": "id"}, store=place)
    assert [entry.name for entry in tmp_path.rglob("*") if entry.is_file()] == []


@pytest.mark.nightly
def test_task_without_permission_to_write_is_reported_in_a_sentence(cluster, store):
    frame = cluster.spark.range(3).select(blocking(store.url)("id").alias("x"))
    with pytest.raises(StoreError, match=r"^the rows could not be written: NotADirectoryError: .*mine") as caught:
        materialize(frame, {"x": "x"}, store=store, dataset_id="mine")
    assert "\n" not in str(caught.value)


def blocking(url):
    """Return a function of a row that makes files where the folders of this write should be."""

    @F.udf("long")
    def passes(x):
        folder = Path(url) / DATASETS / "mine"
        if folder.is_dir():
            for entry in folder.iterdir():
                entry.rename(folder.parent / "aside")
            folder.rmdir()
        folder.touch()
        return x

    return passes
