"""Which datasets and files clean-up deletes: leases, ages, kept datasets, and foreign files."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest

from spark_elastic.data.catalog import (
    DATASETS,
    LEASE_S,
    Limits,
    clear_cache,
    collect_orphans,
    collect_temporary,
    delete_temporary,
    folder_of,
    give_back,
    is_leased,
    leased,
    mark_used,
)
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError

HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path)


def make(store, name, *, keep, age_s=0.0, rows=10):
    """Make a dataset that was last used `age_s` ago."""
    folder = folder_of(store, name)
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
    assert collect_orphans(store, time.time()) == [f"{DATASETS}/old"]
    assert names(store) == ["kept", "young"]


def test_old_unfinished_write_is_deleted(store):
    folder = folder_of(store, "unfinished")
    folder.write_bytes("run/train-00000-abc-000.rows", b"\0" * 8)
    folder.write_bytes("keep", b"")
    assert collect_orphans(store, time.time()) == []
    age(folder, 2 * DAY)
    assert collect_orphans(store, time.time()) == [f"{DATASETS}/unfinished"]


def test_files_of_repeated_tasks_are_deleted_and_the_dataset_stays(store):
    dataset = make(store, "set", keep=True)
    for number, days in enumerate((2, 0)):
        dataset.store.write_bytes(f"run/orphan-{number}.rows", b"\0" * 8)
        if days:
            age(dataset.store, days * DAY)
    assert collect_orphans(store, time.time()) == [f"{DATASETS}/set/run/orphan-0.rows"]
    assert Dataset.open(dataset.store) == dataset
    assert dataset.store.exists("run/orphan-1.rows")


def test_foreign_files_are_never_deleted(store):
    for name, file in (("notes", "readme.txt"), ("pictures", "deep/er/cat.png")):
        folder_of(store, name).write_bytes(file, b"mine")
        age(folder_of(store, name), 90 * DAY)
    assert collect_orphans(store, time.time()) == clear_cache(store) == []
    assert folder_of(store, "notes").read_bytes("readme.txt") == b"mine"


def test_leased_datasets_stay_at_any_age(store):
    dataset = make(store, "set", keep=False, age_s=2 * DAY)
    with dataset.lease():
        age(dataset.store, 2 * DAY)
        assert collect_orphans(store, time.time()) == clear_cache(store) == []
        delete_temporary()
        assert Dataset.open(dataset.store) == dataset
    age(dataset.store, 2 * DAY)
    assert collect_orphans(store, time.time()) == [f"{DATASETS}/set"]


def test_lease_of_a_dead_process_expires(store):
    with leased(store):
        assert is_leased(store, time.time())
        assert not is_leased(store, time.time() + 1.1 * LEASE_S)
    assert not is_leased(store, time.time())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", json.dumps({"until": "soon"}).encode()])
def test_unreadable_lease_expires_by_its_age(store, text):
    store.write_bytes("leases/x.json", text)
    assert is_leased(store, time.time())
    assert not is_leased(store, time.time() + 1.1 * LEASE_S)


def test_clear_cache_deletes_kept_datasets_too(store):
    make(store, "kept", keep=True)
    make(store, "not", keep=False)
    assert sorted(clear_cache(store)) == ["kept", "not"]
    assert names(store) == []


def test_clear_cache_can_leave_recently_used_datasets(store):
    make(store, "old", keep=True, age_s=2 * HOUR)
    make(store, "new", keep=True)
    assert clear_cache(store, older_than_s=HOUR) == ["old"]


def test_clear_cache_to_a_size_deletes_the_least_recently_used_first(store):
    for name, hours in (("b", 2), ("a", 1), ("c", 3)):
        make(store, name, keep=True, age_s=hours * HOUR, rows=1000)
    assert clear_cache(store, max_bytes=20_000) == ["c"]
    assert clear_cache(store, max_bytes=20_000) == []
    assert names(store) == ["a", "b"]


def test_use_of_a_dataset_resets_its_age(store):
    dataset = make(store, "set", keep=False, age_s=2 * DAY)
    mark_used(dataset.store, keep=False)
    assert collect_orphans(store, time.time()) == []


def test_temporary_datasets_are_deleted_at_exit_unless_kept_since(store):
    make(store, "passing", keep=False)
    dataset = make(store, "kept later", keep=False)
    mark_used(dataset.store, keep=True)
    mark_used(dataset.store, keep=False)  # another fit without keep changes nothing
    delete_temporary()
    assert names(store) == ["kept later"]


def fits(store, *sets, limits, at=None):
    """Run a fit on each named dataset, which may repeat, and return the datasets that are left after each fit."""
    left = []
    for number, name in enumerate(sets):
        folder = folder_of(store, name)
        if not folder.exists("manifest.json"):
            pack({"x": np.arange(1000)}, folder)
        mark_used(folder, keep=False)
        give_back(folder, limits, time.time() + number if at is None else at[number])
        left.append("".join(names(store)))
    return left


def test_fits_keep_the_limit_and_delete_the_least_recently_used_first(store):
    limits = Limits(nbytes=20_000)  # two datasets of 8,000 bytes with their other files
    assert fits(store, *"abacd", limits=limits) == ["a", "ab", "ab", "ac", "cd"]
    assert fits(store, *map(str, range(40)), limits=limits)[-1] == "3839"
    delete_temporary()


def test_datasets_are_deleted_some_time_after_the_last_use(store):
    now = time.time()
    limits = Limits(nbytes=1 << 30, ttl_s=HOUR)
    assert fits(store, *"abac", limits=limits, at=[now, now + 1, now + 2000, now + 4000]) == ["a", "ab", "ab", "ac"]
    assert collect_temporary(limits, now + 9000) == [folder_of(store, name).url for name in "ac"]


def test_limit_of_zero_keeps_nothing(store):
    assert fits(store, *"ab", limits=Limits(nbytes=0)) == ["", ""]


def test_limits_do_not_delete_datasets_in_use(store):
    limits, later = Limits(nbytes=0, ttl_s=0), time.time() + 10 * DAY
    held = make(store, "held", keep=False)  # by a caller of materialize
    make(store, "kept", keep=True)
    leased_by_another = make(store, "leased", keep=False)
    with leased(leased_by_another.store):
        assert give_back(leased_by_another.store, limits, time.time()) == []
    mark_used(held.store, keep=False)  # a fit uses it too
    assert give_back(held.store, limits, later) == [leased_by_another.store.url]
    assert names(store) == ["held", "kept"]
    delete_temporary()


def test_default_limit_is_a_quarter_of_a_local_disk_or_fixed_for_remote_stores(store):
    free = shutil.disk_usage(store.local_path()).free
    assert Limits().bytes_in(store, 0) == pytest.approx(free / 4, rel=0.2)
    assert Limits().bytes_in(Store.create("memory://limits"), 0) == 100 << 30


@pytest.mark.parametrize(
    ("limit", "ttl", "expected"),
    [
        ("", "", (None, DAY)),
        ("500", "0", (500, 0)),
        ("20g", "90.5", (20 << 30, 90.5)),
        ("3 TB", "", None),
        ("64Mb", "", (64 << 20, DAY)),
        ("-1", "", None),
        ("", "soon", None),
        ("", "-1", None),
        ("", "nan", None),
    ],
)
def test_environment_variables_set_the_limits(limit, ttl, expected):
    environment = {"SPARK_ELASTIC_ROWS_LIMIT": limit, "SPARK_ELASTIC_ROWS_TTL": ttl}
    if expected is None:
        with pytest.raises(InvalidSettingsError, match=r"SPARK_ELASTIC_ROWS_(LIMIT|TTL) must be"):
            Limits.of_environment(environment)
    else:
        assert Limits.of_environment(environment) == Limits(*expected)


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
    folders = [folder_of(store, name) for name in ("passing", "kept")]
    for folder, keep in zip(folders, (False, True), strict=True):
        pack({"x": np.arange(3)}, folder)
        mark_used(folder, keep)
    delete_temporary()
    assert names(store) == ["kept"]
    assert clear_cache(store) == ["kept"]
    assert names(store) == []


class Closed:
    """A filesystem that does not work any more at exit."""

    type_name = "closed"

    def get_file_info(self, path):
        raise RuntimeError("already finalised")

    def open_output_stream(self, path, compression):
        return open(os.devnull, "wb")

    def create_dir(self, path, recursive):
        pass

    def move(self, source, target):
        pass


def test_failed_deletion_does_not_keep_the_other_datasets(store, caplog):
    gone = Store("closed://x", "x", Closed())
    with pytest.raises(RuntimeError):  # whether the dataset is kept cannot be read
        mark_used(gone, keep=False)
    from spark_elastic.data import catalog

    catalog._temporary[gone.url] = catalog._Temporary(gone, os.getpid())
    make(store, "set", keep=False)
    delete_temporary()
    assert names(store) == []
    assert "closed://x could not be deleted: already finalised" in caplog.text
