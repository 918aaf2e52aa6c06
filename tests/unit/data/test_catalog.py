"""Which datasets and files clean-up deletes: leases, ages, kept datasets, and foreign files."""

import json
import os
import time

import numpy as np
import pytest

from spark_elastic.data import catalog
from spark_elastic.data.catalog import (
    DATASET_LEASE_S,
    DATASETS,
    clear_cache,
    collect_orphans,
    dataset_folder,
    delete_temporary,
    is_leased,
    leased,
    mark_used,
)
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store

HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path)


def make(store, name, *, keep, age_s=0.0, rows=10):
    """Make a dataset that was last used `age_s` ago."""
    folder = dataset_folder(store, name)
    dataset = pack({"x": np.arange(rows)}, folder)
    mark_used(folder, keep)
    age(folder, age_s)
    return dataset


def age(folder, age_s):
    then = time.time() - age_s
    for path in folder.local_path().rglob("*"):
        os.utime(path, (then, then))


def names(store):
    return [entry.path.rpartition("/")[2] for entry in store.list(DATASETS)]


def test_old_datasets_that_are_not_kept_are_deleted(store):
    make(store, "old", keep=False, age_s=2 * DAY)
    make(store, "young", keep=False, age_s=HOUR)
    make(store, "kept", keep=True, age_s=90 * DAY)
    assert collect_orphans(store) == [f"{DATASETS}/old"]
    assert names(store) == ["kept", "young"]


def test_old_unfinished_write_is_deleted(store):
    folder = dataset_folder(store, "unfinished")
    folder.write_bytes("run/train-00000-abc-000.rows", b"\0" * 8)
    folder.write_bytes("keep", b"")
    assert collect_orphans(store) == []
    age(folder, 2 * DAY)
    assert collect_orphans(store) == [f"{DATASETS}/unfinished"]


def test_files_of_repeated_tasks_are_deleted_and_the_dataset_stays(store):
    dataset = make(store, "set", keep=True)
    for number, days in enumerate((2, 0)):
        dataset.store.write_bytes(f"run/orphan-{number}.rows", b"\0" * 8)
        if days:
            age(dataset.store, days * DAY)
    assert collect_orphans(store) == [f"{DATASETS}/set/run/orphan-0.rows"]
    assert Dataset.open(dataset.store) == dataset
    assert dataset.store.exists("run/orphan-1.rows")


def test_foreign_files_are_never_deleted(store):
    for name, file in (("notes", "readme.txt"), ("pictures", "deep/er/cat.png")):
        dataset_folder(store, name).write_bytes(file, b"mine")
        age(dataset_folder(store, name), 90 * DAY)
    assert collect_orphans(store) == clear_cache(store) == []
    assert dataset_folder(store, "notes").read_bytes("readme.txt") == b"mine"


def test_leased_datasets_stay_at_any_age(store):
    dataset = make(store, "set", keep=False, age_s=2 * DAY)
    with dataset.lease():
        age(dataset.store, 2 * DAY)
        assert collect_orphans(store) == clear_cache(store) == []
        delete_temporary()
        assert Dataset.open(dataset.store) == dataset
    age(dataset.store, 2 * DAY)
    assert collect_orphans(store) == [f"{DATASETS}/set"]


def test_lease_of_a_dead_process_expires(store):
    with leased(store):
        assert is_leased(store)
        lease = store.list("leases")[0].path
        store.write_bytes(lease, json.dumps({"until": time.time() - 1}).encode())
        assert is_leased(store), "it was written just now, by a host whose clock is behind"
        age(store, 1.1 * DATASET_LEASE_S)
        assert not is_leased(store)
    assert not is_leased(store)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", json.dumps({"until": "soon"}).encode()])
def test_unreadable_lease_expires_by_its_age(store, text):
    store.write_bytes("leases/x.json", text)
    assert is_leased(store)
    age(store, 1.1 * DATASET_LEASE_S)
    assert not is_leased(store)


@pytest.mark.parametrize("ahead_s", [2 * DATASET_LEASE_S, -2 * DATASET_LEASE_S])
def test_clock_of_the_host_does_not_decide_what_is_deleted(store, ahead_s, monkeypatch):
    dataset = make(store, "set", keep=False)
    young, old = make(store, "young", keep=True), make(store, "old", keep=True, age_s=HOUR)
    with dataset.lease():
        monkeypatch.setattr("time.time", lambda: os.stat("/proc/self").st_ctime + ahead_s)
        monkeypatch.setattr(catalog, "wall", time.time)
        assert clear_cache(store, older_than_s=DATASET_LEASE_S) == ["old"]
        assert clear_cache(store) == ["young"]
        delete_temporary()
        assert Dataset.open(dataset.store) == dataset
    assert not old.store.exists()
    assert not young.store.exists()
    assert [entry.path for entry in store.list()] == [DATASETS], "the clock's file is gone"


@pytest.mark.parametrize("left_s", [60, -60])
def test_lease_in_a_store_without_times_is_valid_until_the_time_in_it(left_s):
    store = Store.create("memory://no-times")
    store.write_bytes("leases/x.json", json.dumps({"until": time.time() + left_s}).encode())
    assert is_leased(store) is (left_s > 0)
    store.delete()


def test_clear_cache_to_a_size_deletes_the_least_recently_used_first(store):
    for name, hours in (("b", 2), ("a", 1), ("c", 3)):
        make(store, name, keep=True, age_s=hours * HOUR, rows=1000)
    assert clear_cache(store, max_bytes=20_000) == ["c"]
    assert clear_cache(store, max_bytes=20_000) == []
    assert names(store) == ["a", "b"]


def test_temporary_datasets_are_deleted_at_exit_unless_kept_since(store):
    make(store, "passing", keep=False)
    dataset = make(store, "kept later", keep=False)
    mark_used(dataset.store, keep=True)
    mark_used(dataset.store, keep=False)  # another fit without keep changes nothing
    delete_temporary()
    assert names(store) == ["kept later"]


def test_forked_child_deletes_nothing(store):
    make(store, "set", keep=False)
    child = os.fork()
    if not child:
        try:
            delete_temporary()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert names(store) == ["set"]
    delete_temporary()
    assert names(store) == []


def test_datasets_in_remote_stores_are_cleaned_up_too():
    store = Store.create("memory://cache-test")
    folders = [dataset_folder(store, name) for name in ("passing", "kept")]
    for folder, keep in zip(folders, (False, True), strict=True):
        pack({"x": np.arange(3)}, folder)
        mark_used(folder, keep)
    delete_temporary()
    assert names(store) == ["kept"]
    assert clear_cache(store) == ["kept"]
    assert names(store) == []
