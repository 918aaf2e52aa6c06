"""Remote datasets are read through a cache on the local disk: limited, shared, checked, and safe if processes die."""

import contextlib
import fcntl
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from spark_elastic.data import remote_cache
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.data.order.windows import WindowSettings
from spark_elastic.data.reader import least_cache_of_reader
from spark_elastic.data.remote_cache import CachedSplit
from spark_elastic.data.rows import Numbering
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError, InvalidSettingsError, StoreError
from tests.integration.processes import wait_until
from tests.leftovers import Before, nothing_left
from tests.unit.data.datasets import labels, numbered

fsspec_local = pytest.importorskip("fsspec.implementations.local")
pytest.importorskip("pyarrow")


class Far(fsspec_local.LocalFileSystem):
    """A filesystem that looks remote, and counts the bytes that are read from it."""

    protocol = "far"
    cachable = False
    read_bytes = 0
    drops = 0
    gate = None

    def _open(self, path, mode="rb", **options):
        far = self

        class Counting(io.BytesIO):
            def read(self, nbytes=-1):
                if far.gate is not None:
                    far.stuck.set()
                    far.gate.wait()
                if far.drops:
                    far.drops -= 1
                    raise RuntimeError("connection reset")  # not all packages raise OSError
                part = super().read(nbytes)
                far.read_bytes += len(part)
                return part

        return Counting(Path(path).read_bytes())


def remote(folder):
    far = Far()
    dataset = Dataset.open(Store.of(far, str(folder)))
    far.read_bytes = 0
    return far, dataset


def opened(dataset, cache, limit=None, least=0):
    shards = dataset.manifest.splits["train"]
    numbering = Numbering([shard.rows for shard in shards])
    sidecars = any(shard.sidecar for shard in shards)
    return CachedSplit(dataset.store, dataset.manifest, "train", numbering, sidecars, cache, limit, least)


def cached_bytes(folder):
    """Return the bytes on the disk; nobody makes room meanwhile, so none is counted that went for another one."""
    total = 0
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed, or deleted, since it was listed
                total += path.stat().st_blocks * 512
    return total


def test_remote_dataset_is_read_like_a_local_one_and_fetched_once(tmp_path):
    local = numbered(tmp_path / "set", [5000, 70_000, 3])
    far, dataset = remote(tmp_path / "set")
    for order in ("global", "lanes"):
        options = {"batch_size": 500, "order": order}
        with local.reader(**options) as near, dataset.reader(cache_dir=tmp_path / "cache", **options) as reader:
            for epoch in (0, 1):
                assert labels(near.epoch(epoch)) == labels(reader.epoch(epoch))
    assert far.read_bytes == dataset.manifest.nbytes("train")


def test_sidecars_are_fetched_with_the_rows_that_refer_to_them(tmp_path):
    values = {"id": np.arange(3000), "text": [f"{row:0{row % 90}d}" for row in range(3000)]}
    pack(values, tmp_path / "set", shards=3)
    _, dataset = remote(tmp_path / "set")
    options = {"batch_size": 64, "order": "lanes", "lanes": WindowSettings(4, 50, 200), "cache_dir": tmp_path / "cache"}
    with dataset.reader(**options) as reader:
        seen = {}
        for batch in reader.epoch(0):
            seen |= dict(zip(batch["id"].tolist(), batch["text"], strict=True))
    assert seen == dict(enumerate(values["text"]))


@pytest.mark.parametrize("options", [{"order": "lanes"}, {"order": "global"}, {"order": "auto"}])
def test_cache_that_cannot_hold_a_shuffle_is_refused_with_the_least(tmp_path, options):
    numbered(tmp_path / "set", [5000, 70_000, 3])
    _, dataset = remote(tmp_path / "set")
    least = 122_880 + 1_683_456 + 4096  # 24 bytes a row, in whole blocks of the disk
    with pytest.raises(InvalidSettingsError, match=rf"a cache of {least - 1} bytes .* at least {least} "):
        dataset.reader(batch_size=10, cache_bytes=least - 1, cache_dir=tmp_path / "cache", **options)
    with dataset.reader(batch_size=500, cache_bytes=least, cache_dir=tmp_path / "cache", **options) as reader:
        assert sorted(row for batch in labels(reader.epoch(0)) for row in batch) == list(range(75_003))
    assert cached_bytes(tmp_path / "cache") <= least


def test_cache_keeps_its_limit_as_shards_come_and_go(tmp_path):
    """Rows in the order of the files need a few shards at a time; those that were used make room for the next ones."""
    rows = 20 * 4096
    values = {"label": np.arange(rows), "pad": np.zeros((rows, 254), np.float32)}
    pack(values, tmp_path / "set", shards=20)  # 4 MiB each
    far, dataset = remote(tmp_path / "set")
    options = {"batch_size": 4096, "shuffle": False, "cache_dir": tmp_path / "cache"}
    with pytest.raises(InvalidSettingsError, match="at least") as refused:
        dataset.reader(cache_bytes=1, **options)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    assert least < 16 << 22
    most = 0
    with dataset.reader(cache_bytes=least, **options) as reader:
        for epoch in range(2):
            for number, batch in enumerate(reader.epoch(epoch)):
                assert batch["label"].tolist() == list(range(number * 4096, (number + 1) * 4096))
                most = max(most, cached_bytes(tmp_path / "cache"))
    assert least / 2 < most <= least
    assert far.read_bytes > dataset.manifest.nbytes("train"), "the second epoch fetches again what was deleted"


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [100, 2048])
def test_workers_of_a_host_that_read_in_the_order_of_the_files_fit_into_the_least(batch_size, tmp_path, monkeypatch):
    """The second worker is as far ahead as its read-ahead allows whenever the first one, which has none, needs rows."""
    rows = 64 * 1024
    values = {"label": np.arange(rows), "pad": np.zeros((rows, 254), np.float32)}
    pack(values, tmp_path / "set", shards=64)  # 1 MiB each
    _, dataset = remote(tmp_path / "set")
    limit = {"batch_size": batch_size, "shuffle": False}
    least = least_cache_of_reader(dataset, "train", **limit)
    assert least < dataset.manifest.nbytes("train")
    monkeypatch.setattr(remote_cache, "ROOM_TIMEOUT_S", -1.0)  # a fetch without room fails at once
    options = {**limit, "size": 2, "cache_dir": tmp_path / "cache", "cache_bytes": least}
    with dataset.reader(rank=0, prefetch=0, **options) as slow, dataset.reader(rank=1, **options) as fast:
        seen = []
        first, second = slow.epoch(0), fast.epoch(0)
        for ahead in second:
            until_nothing_is_gathered(fast)
            seen += [*next(first)["label"].tolist(), *ahead["label"].tolist()]
        assert next(first, None) is None
    assert sorted(seen) == list(range(rows))


def until_nothing_is_gathered(reader):
    """Wait until a reader has gathered as many groups as it keeps ready."""
    for running in list(reader._running):
        wait_until(lambda each=running: each._ready.qsize() >= each.depth or not each._thread.is_alive(), 60, "full")


def test_shard_in_use_is_not_deleted_and_the_reader_says_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_cache, "ROOM_TIMEOUT_S", 0.0)
    numbered(tmp_path / "set", [1024, 1024])  # 24 KiB each
    _, dataset = remote(tmp_path / "set")
    first, second = (opened(dataset, tmp_path / "cache", 40_000) for _ in range(2))
    held = first.request([(0, 1)])
    first.wait(held, Future())
    other = second.request([(1024, 1025)])
    with pytest.raises(StoreError, match=r"limit of 40000 bytes; .* use 24576, .* 24576 does not fit .* least 49152"):
        second.wait(other, Future())
    second.release(other)
    first.release(held)
    other = second.request([(1024, 1025)])
    second.wait(other, Future())
    assert len(list((tmp_path / "cache").glob("*.shard"))) == 1
    first.close()
    second.close()


def test_disk_without_room_for_the_shards_is_named_at_the_start(tmp_path, monkeypatch):
    numbered(tmp_path / "set", [40_000])
    _, dataset = remote(tmp_path / "set")
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(StoreError, match=r"has room for 80000 bytes, and the shards of 'train' .* have 962560"):
        dataset.reader(batch_size=10, cache_dir=tmp_path / "cache")


@pytest.mark.nightly
def test_shards_unread_for_days_are_deleted_unless_held(tmp_path):
    cache = tmp_path / "cache"
    numbered(tmp_path / "set", [1024, 1024, 1024])
    _, dataset = remote(tmp_path / "set")
    split = opened(dataset, cache)
    for rows, keep in (((0, 1), False), ((1024, 1025), True), ((2048, 2049), False)):
        request = split.request([rows])
        split.wait(request, Future())
        if not keep:
            split.release(request)
    old, read, _ = (files[0].path for files in split._files)
    notes = cache / "notes.shard"
    notes.touch()
    dead = old.with_suffix(".partial")
    dead.write_bytes(b"of a process that was killed")
    for path in (old, read, notes, dead):
        os.utime(path, (0, path.stat().st_mtime))
    opened(dataset, cache).close()
    assert not old.exists()
    assert not dead.exists()
    assert len(list(cache.glob("*.shard"))) == 3
    split.close()


@pytest.mark.parametrize("damage", ["written", "cut off", "partial"])
def test_damaged_copy_is_fetched_again(tmp_path, damage):
    numbered(tmp_path / "set", [40_000])
    far, dataset = remote(tmp_path / "set")
    options = {"batch_size": 1000, "cache_dir": tmp_path / "cache"}
    with dataset.reader(**options) as reader:
        expected = labels(reader.epoch(0))
    (copy,) = (tmp_path / "cache").glob("*.shard")
    with copy.open("r+b") as file:
        if damage == "cut off":
            file.truncate(500_000)
        file.seek(123_456)
        file.write(b"damaged")
    if damage == "partial":  # its process was killed
        copy.rename(copy.with_suffix(".partial"))
    before = far.read_bytes
    with dataset.reader(**options) as reader:
        assert labels(reader.epoch(0)) == expected
    assert far.read_bytes == 2 * before
    assert len(list((tmp_path / "cache").iterdir())) == 2


READ = """
import sys
from tests.unit.data.test_remote_cache import remote
far, dataset = remote(sys.argv[1])
with dataset.reader(batch_size=1000, cache_dir=sys.argv[2], cache_bytes=int(sys.argv[3])) as reader:
    rows = sorted(row for batch in reader.epoch(0) for row in batch["label"].tolist())
print(rows == list(range(200_000)), far.read_bytes)
"""


def test_processes_of_a_host_fetch_each_shard_once(tmp_path):
    dataset = numbered(tmp_path / "set", [50_000] * 4)
    limit = 4 * remote_cache.disk_bytes(50_000 * 24)
    command = [sys.executable, "-c", READ, str(tmp_path / "set"), str(tmp_path / "cache"), str(limit)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [each.communicate(timeout=60)[0].split() for each in running]
    assert [right for right, _ in said] == ["True"] * 3
    assert sum(int(nbytes) for _, nbytes in said) == dataset.manifest.nbytes("train")
    assert cached_bytes(tmp_path / "cache") <= limit


@pytest.mark.parametrize("options", [{"order": "global"}, {"order": "lanes"}, {"shuffle": False}])
def test_remote_file_with_a_wrong_checksum_is_refused(tmp_path, options):
    numbered(tmp_path / "set", [40_000])
    with (tmp_path / "set" / "0.rows").open("r+b") as file:
        file.seek(24 * 20_000)
        file.write(b"another")
    _, dataset = remote(tmp_path / "set")
    with (
        dataset.reader(batch_size=1000, cache_dir=tmp_path / "cache", **options) as reader,
        pytest.raises(DatasetError, match=r"0\.rows has the checksum \w+, the manifest says"),
    ):
        list(reader.epoch(0))


@pytest.mark.parametrize("order", ["global", "lanes"])
def test_missing_remote_file_is_a_store_error(tmp_path, order):
    numbered(tmp_path / "set", [40_000])
    _, dataset = remote(tmp_path / "set")
    (tmp_path / "set" / "0.rows").unlink()
    before = Before()
    with dataset.reader(batch_size=1000, cache_dir=tmp_path / "cache", order=order) as reader:
        with pytest.raises(StoreError, match=r"0\.rows cannot be read"):
            next(reader.epoch(0))
        # with the reader's own and the order's
        assert len(before.threads()) <= remote_cache._FETCHERS + remote_cache._SHARDS + 2


def test_dropped_connection_is_retried_with_a_new_handle(tmp_path):
    numbered(tmp_path / "set", [40_000])
    far, dataset = remote(tmp_path / "set")
    far.drops = 2  # perhaps both during one request
    with dataset.reader(batch_size=1000, cache_dir=tmp_path / "cache", order="lanes") as reader:
        assert sorted(row for batch in labels(reader.epoch(0)) for row in batch) == list(range(40_000))
    assert far.drops == 0


def test_new_dataset_at_an_old_url_is_not_read_from_the_cache(tmp_path):
    for add in (0, 7):
        where = tmp_path / "set"
        (where / MANIFEST_NAME).unlink(missing_ok=True)
        pack({"label": np.arange(1000) + add}, where)
        _, dataset = remote(where)
        with dataset.reader(batch_size=1000, cache_dir=tmp_path / "cache") as reader:
            (batch,) = reader.epoch(0)
        assert batch["label"].min() == add


@pytest.mark.parametrize("options", [{"order": "lanes"}, {"order": "global"}, {"shuffle": False}])
def test_close_does_not_wait_for_running_fetches(tmp_path, options):
    numbered(tmp_path / "set", [40_000])
    far, dataset = remote(tmp_path / "set")
    far.stuck, far.gate = threading.Event(), threading.Event()
    reader = dataset.reader(batch_size=10, cache_dir=tmp_path / "cache", **options)
    said = []

    def consume():
        try:
            next(reader.epoch(0))
        except ValueError as error:
            said.append(str(error))

    consumer, closing = threading.Thread(target=consume), threading.Thread(target=reader.close)
    consumer.start()
    assert far.stuck.wait(20)
    closing.start()
    consumer.join(timeout=20)
    far.gate.set()
    closing.join()
    consumer.join()
    assert said == ["the reader was closed in the middle of an epoch"]


def test_threads_and_descriptors_are_gone_after_closing(tmp_path):
    numbered(tmp_path / "set", [400_000])
    _, dataset = remote(tmp_path / "set")
    with nothing_left() as before:
        for order in ("global", "lanes"):
            with dataset.reader(batch_size=1000, cache_dir=tmp_path / "cache", order=order) as reader:
                next(reader.epoch(0))
                assert before.threads()


@pytest.mark.nightly
def test_shuffle_of_more_shards_than_files_may_be_open_raises_that_limit(tmp_path):
    numbered(tmp_path / "set", [5] * 90)
    _, dataset = remote(tmp_path / "set")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, before[1]))
    try:
        with dataset.reader(batch_size=450, cache_dir=tmp_path / "cache") as reader:
            (batch,) = labels(reader.epoch(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sorted(batch) == list(range(450))
