"""Remote datasets are read through a cache on the local disk: limited, shared, checked, and safe if processes die."""

from __future__ import annotations

import io
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from spark_elastic.data import block_file, remote_cache
from spark_elastic.data import rows as mapping
from spark_elastic.data.block_file import BLOCK
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.data.order.windows import WindowSettings
from spark_elastic.data.remote_cache import CachedSplit, RemoteFile
from spark_elastic.data.rows import Numbering
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError, InvalidSettingsError, StoreError
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
    return far, Dataset.open(Store.of(far, str(folder)))


def opened(dataset, cache, limit=None):
    shards = dataset.manifest.splits["train"]
    numbering = Numbering([shard.rows for shard in shards], dataset.layout.rows_per_page_run)
    return CachedSplit(dataset.store, dataset.manifest, "train", numbering, dataset.layout.has_sidecar, cache, limit)


def cached_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*/*.data"))


def test_remote_dataset_is_read_like_a_local_one_and_fetched_once(tmp_path):
    local = numbered(tmp_path / "set", [5000, 70_000, 3])
    far, dataset = remote(tmp_path / "set")
    for order in ("global", "lanes"):
        options = {"batch_size": 500, "order": order}
        with local.reader(**options) as near, dataset.reader(cache_dir=tmp_path / "cache", **options) as reader:
            for epoch in (0, 1):
                assert labels(near.epoch(epoch)) == labels(reader.epoch(epoch))
    nbytes = dataset.manifest.nbytes("train")
    assert nbytes <= far.read_bytes < 1.2 * nbytes + 3 * BLOCK


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


def test_fetched_sidecars_are_read_without_a_mapped_range(tmp_path, monkeypatch):
    monkeypatch.setattr(mapping, "can_map", lambda: False)
    rows = 500
    sparse = np.eye(rows, 9) + np.arange(rows)[:, None] * np.eye(rows, 9)
    values = {"id": np.arange(rows), "text": [f"{row:0{row % 9}d}" for row in range(rows)], "sparse": sparse}
    pack(values, tmp_path / "set", sparse=["sparse"], shards=3)
    _, dataset = remote(tmp_path / "set")
    for order in ("global", "lanes"):
        with dataset.reader(batch_size=64, cache_dir=tmp_path / order, order=order) as reader:
            for batch in reader.epoch(0):
                assert batch["text"] == [values["text"][row] for row in batch["id"]]
                assert (batch["sparse"] == sparse[batch["id"]]).all()


def test_cache_keeps_its_limit_and_rows_stay_correct(tmp_path):
    rows = 400_000
    dataset_there = pack(
        {"label": np.arange(rows), "pad": np.zeros((rows, 30), np.float32)}, tmp_path / "set", shards=2
    )
    nbytes = dataset_there.manifest.nbytes("train")
    _, dataset = remote(tmp_path / "set")
    limit = nbytes // 2
    settings = WindowSettings(16, 512, 1500)
    options = {"batch_size": 4096, "order": "lanes", "lanes": settings}
    with dataset.reader(cache_dir=tmp_path / "cache", cache_bytes=limit, **options) as reader:
        found = np.concatenate([batch["label"] for batch in reader.epoch(0)])
    assert (np.sort(found) == np.arange(rows)).all()
    assert cached_bytes(tmp_path / "cache") < limit + (17 << 20)
    with pytest.raises(InvalidSettingsError, match="cannot hold"):
        dataset.reader(batch_size=10, order="global", cache_bytes=limit)
    with dataset.reader(batch_size=4096, shuffle=False, cache_dir=tmp_path / "cache", cache_bytes=limit) as reader:
        assert [row for batch in labels(reader.epoch(0)) for row in batch] == list(range(rows))
    assert cached_bytes(tmp_path / "cache") < limit + (17 << 20)
    with dataset.reader(batch_size=10, cache_dir=tmp_path / "cache", cache_bytes=limit) as reader:
        assert reader.order == "lanes"


def test_default_limit_leaves_free_disk(tmp_path, monkeypatch):
    pack({"x": np.zeros((1200, 10_000), np.float32)}, tmp_path / "set")
    _, dataset = remote(tmp_path / "set")
    free = shutil.disk_usage(tmp_path)._replace(free=16 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    split = opened(dataset, tmp_path / "cache")
    for start in range(0, 1200, 100):
        wanted = split.request([(start, start + 100)])
        split.wait(wanted, Future())
        split.release(wanted)
    split.make_room()
    assert 0 < cached_bytes(tmp_path / "cache") < 16 << 20
    split.close()


def test_only_datasets_unread_for_days_are_removed_from_the_cache(tmp_path):
    cache = tmp_path / "cache"
    folders = {}
    for name, rows in (("old", 10), ("read", 20), ("new", 30)):
        numbered(tmp_path / name, [rows])
        before = set(cache.glob("*"))
        split = opened(remote(tmp_path / name)[1], cache)
        (folders[name],) = set(cache.glob("*")) - before
        if name != "read":
            split.close()
    foreign, notes = cache / ("f" * 24), cache / "notes"
    for folder, file in ((foreign, "mine.txt"), (notes, "a.data")):
        folder.mkdir()
        (folder / file).touch()
        (folder / "lock").touch()
    for folder in (folders["old"], folders["read"], foreign, notes):
        os.utime(folder / "lock", (0, 0))
    numbered(tmp_path / "other", [40])
    opened(remote(tmp_path / "other")[1], cache).close()
    assert not folders["old"].exists()
    assert len(list(folders["read"].glob("*.data"))) == len(list(folders["new"].glob("*.data"))) == 1
    assert (foreign / "mine.txt").exists()
    assert (notes / "a.data").exists()


def test_first_batch_fetches_a_few_parts_only(tmp_path):
    pack({"pad": np.zeros((500, 30_000), np.float32)}, tmp_path / "set")
    far, dataset = remote(tmp_path / "set")
    with dataset.reader(batch_size=4, shuffle=False, prefetch=0, cache_dir=tmp_path / "cache") as reader:
        assert next(reader.epoch(0)).rows == 4
    assert far.read_bytes < dataset.manifest.nbytes("train") // 2


def test_damaged_block_is_fetched_again(tmp_path):
    numbered(tmp_path / "set", [40_000])
    far, dataset = remote(tmp_path / "set")
    options = {"batch_size": 1000, "cache_dir": tmp_path / "cache"}
    with dataset.reader(**options) as reader:
        expected = labels(reader.epoch(0))
    before = far.read_bytes
    (copy,) = (tmp_path / "cache").glob("*/*.data")
    with copy.open("r+b") as file:
        file.seek(3 * BLOCK + 77)
        file.write(b"damaged")
    with dataset.reader(**options) as reader:
        assert labels(reader.epoch(0)) == expected
    assert far.read_bytes == before + BLOCK


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
        assert len(before.threads()) <= remote_cache._FETCHERS + 2  # with the reader's own and the order's


def test_dropped_connection_is_retried_with_a_new_handle(tmp_path):
    numbered(tmp_path / "set", [40_000])
    far, dataset = remote(tmp_path / "set")
    far.drops = 2  # perhaps both during one request
    with dataset.reader(batch_size=1000, cache_dir=tmp_path / "cache", order="lanes") as reader:
        assert sorted(row for batch in labels(reader.epoch(0)) for row in batch) == list(range(40_000))
    assert far.drops == 0


def test_threads_never_share_a_handle():
    handles = []

    class Handle:
        def __init__(self):
            handles.append(self)
            self.busy = False
            self.closed = False

        def read_at(self, nbytes, offset):
            assert not self.busy
            self.busy = True
            data = bytes(nbytes)
            self.busy = False
            return data

        def close(self):
            self.closed = True

    class Stack(list):
        """A list from which another thread takes the last item between a look and a pop."""

        def __bool__(self):
            return True

    file = RemoteFile(Handle, "a")
    file._idle = Stack()
    assert file.read(0, 3) == bytes(3)
    assert file.read(0, 3) == bytes(3)
    assert len(handles) == 1
    file._idle = list(file._idle)
    file.close()
    assert handles[0].closed


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


def test_making_room_ignores_files_that_are_being_created(tmp_path):
    numbered(tmp_path / "set", [400_000])
    _, dataset = remote(tmp_path / "set")
    others = tmp_path / "cache" / "other"
    others.mkdir(parents=True)
    (others / "empty.data").touch()
    (others / "without.data").write_bytes(b"x" * 100)
    (others / "short.data").write_bytes(b"x" * 3 * BLOCK)
    (others / "short.state").write_bytes(b"x" * 8)
    before = {path.name: path.read_bytes() for path in others.iterdir()}
    split = opened(dataset, tmp_path / "cache", 2 << 20)
    wanted = split.request([(0, 400_000)])
    split.wait(wanted, Future())
    split.release(wanted)
    split.make_room()
    assert cached_bytes(tmp_path / "cache") <= 2 << 20
    split.close()
    assert {path.name: path.read_bytes() for path in others.iterdir()} == before


def test_blocks_stay_if_the_filesystem_cannot_punch_holes(tmp_path, monkeypatch, caplog):
    numbered(tmp_path / "set", [40_000])
    far, dataset = remote(tmp_path / "set")
    split = opened(dataset, tmp_path / "cache", 100_000)
    for _ in range(2):
        wanted = split.request([(0, 40_000)])
        split.wait(wanted, Future())
        split.release(wanted)
        before = far.read_bytes
        monkeypatch.setattr(block_file, "_punch", lambda *args: False)  # a filesystem without holes
        split.make_room()
    assert far.read_bytes == before
    assert caplog.text.count("cannot be made smaller") == 1
    split.close()
