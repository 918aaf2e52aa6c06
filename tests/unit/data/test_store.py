"""Stores behave alike on local folders, filesystems of fsspec and filesystems of pyarrow."""

from __future__ import annotations

import os
import threading
import uuid

import fsspec
import pytest
from pyarrow import fs

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError


@pytest.fixture(params=["path", "file uri", "memory uri", "fsspec file", "subtree", "wrapped"])
def store(request, tmp_path):
    """Every kind of store, on a folder that does not exist yet."""
    memory = f"memory://{uuid.uuid4().hex}/a folder"
    yield {
        "path": lambda: Store.create(tmp_path / "a folder"),
        "file uri": lambda: Store.create((tmp_path / "a folder").as_uri()),
        "memory uri": lambda: Store.create(memory),
        "fsspec file": lambda: Store.of(fsspec.filesystem("file"), str(tmp_path / "a folder")),
        "subtree": lambda: Store.of(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "a folder"),
        # a local folder through pyarrow's filesystem: files are renamed, as on HDFS
        "wrapped": lambda: Store.of(
            fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("dir", path=str(tmp_path), target_protocol="file"))),
            "a folder",
        ),
    }[request.param]()
    fsspec.filesystem("memory").store.clear()


def test_what_is_written_can_be_read_listed_and_deleted(store):
    assert not store.exists("one/two.bin")
    assert store.write_bytes("one/two.bin", b"first")
    assert store.write_bytes("one/two.bin", b"second!")
    assert store.write_bytes("three", b"")
    assert store.read_bytes("one/two.bin") == b"second!"
    assert store.exists("one/two.bin")
    assert (store.size("one/two.bin"), store.size("one"), store.size("four")) == (7, None, None)
    assert [(entry.path, entry.nbytes, entry.is_dir) for entry in store.list()] == [
        ("one", 0, True),
        ("three", 0, False),
    ]
    assert [entry.path for entry in store.list(recursive=True)] == ["one", "one/two.bin", "three"]
    assert [entry.path for entry in store.list("one")] == ["one/two.bin"]
    assert [entry.path for entry in store.sub("one").list()] == ["two.bin"]
    store.delete("one")
    store.delete("three")
    store.delete("never was")
    assert store.list() == store.list("nowhere") == []
    store.delete()
    assert not store.exists()


@pytest.mark.parametrize("only_if_absent", [False, True])
def test_a_durable_file_has_its_name_on_the_disk_too(tmp_path, monkeypatch, only_if_absent):
    """A power cut must lose neither the contents, nor the name, nor the names of the folders above."""
    done = []

    def noted(name):
        real = getattr(os, name)

        def call(*args):
            where = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[-1])
            done.append((name, os.path.relpath(where, tmp_path)))
            return real(*args)

        return call

    for name in ("fsync", "replace", "link"):
        monkeypatch.setattr(os, name, noted(name))
    Store.create(tmp_path).write_bytes("run/one/state.pt", b"x" * 100, only_if_absent=only_if_absent)
    folders, (contents, named, folder) = done[:-3], done[-3:]
    assert {path for _, path in folders} == {".", "run"}, "those that new folders were made in"
    assert contents[1].endswith(".partial")
    assert named == ("link" if only_if_absent else "replace", "run/one/state.pt")
    assert folder == ("fsync", "run/one")
    done.clear()
    Store.create(tmp_path).write_bytes("run/one/lease", b"x", durable=False)
    assert [name for name, _ in done] == ["replace"]


def test_streams_write_and_read_parts(store):
    with store.open_output("deep/rows.gz") as stream:  # the name must not lead to compression
        stream.write(b"0123")
        stream.write(b"4567")
    with store.open_input("deep/rows.gz") as file:
        file.seek(2)
        assert file.read(4) == b"2345"
    assert store.size("deep/rows.gz") == 8


def test_existing_file_can_be_kept(store):
    assert store.write_bytes("x", b"mine", only_if_absent=True)
    assert not store.write_bytes("x", b"yours", only_if_absent=True)
    assert store.read_bytes("x") == b"mine"
    assert [entry.path for entry in store.list()] == ["x"]  # nothing half-written stays


def test_paths_cannot_leave_the_store(store):
    with pytest.raises(ValueError, match="leads out"):
        store.read_bytes("../secret")


def test_one_of_several_concurrent_writers_wins_on_a_local_folder(tmp_path):
    store = Store.create(tmp_path)
    barrier, won = threading.Barrier(8), []

    def write(number: int) -> None:
        barrier.wait()
        if store.write_bytes("x", b"%d" % number, only_if_absent=True):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % number for number in won] == [store.read_bytes("x")]


def test_local_folders_are_recognised_in_every_notation(tmp_path):
    for same in (
        Store.create(str(tmp_path)),
        Store.create(tmp_path.as_uri()),
        Store.create(f"{tmp_path}/"),
        Store.of(fs.LocalFileSystem(), str(tmp_path)),
        Store.of(fs.SubTreeFileSystem(str(tmp_path.parent), fs.LocalFileSystem()), tmp_path.name),
        Store.of(fsspec.filesystem("file"), str(tmp_path)),
    ):
        assert same == Store(str(tmp_path), str(tmp_path))
        assert same.local_path("x") == tmp_path / "x"
        assert os.fspath(same) == str(tmp_path)


def test_databricks_uris_are_the_paths_that_every_node_mounts():
    assert Store.create("dbfs:/sets/a").root == "/dbfs/sets/a"
    assert Store.create("dbfs:/Volumes/main/sets").root == "/Volumes/main/sets"


def test_a_remote_store_has_no_local_path():
    with pytest.raises(StoreError, match="its files have no paths on this machine"):
        Store.create("memory://x").local_path("y")


def test_unknown_scheme_is_reported_with_a_remedy():
    with pytest.raises(
        StoreError, match=r"'nosuch://x'.*pyarrow: .*fsspec: .*Install the fsspec package for nosuch://"
    ):
        Store.create("nosuch://x")


def test_the_default_is_a_folder_that_only_this_user_can_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = Store.create(None)
    assert store.local_path().stat().st_mode & 0o777 == 0o700
    assert Store.create(None) == store


def test_default_folder_that_is_a_link_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    expected = Store.create(None).local_path()
    expected.rmdir()
    (tmp_path / "elsewhere").mkdir()
    expected.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="belongs to another user"):
        Store.create(None)


def test_unfinished_files_are_deleted_and_others_are_not(tmp_path):
    store = Store.create(tmp_path)
    (tmp_path / "deeper").mkdir()
    kept = ["run.json", "mine.partial", "deeper/.run.json.0123456789abcdef0123456789abcdef.partial"]
    for name in [*kept, ".run.json.0123456789abcdef0123456789abcdef.partial"]:
        (tmp_path / name).touch()
    store.delete_unfinished()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
