"""Datasets written from arrays: the files contain the values, and invalid files are not read as a dataset."""

import json
import os

import numpy as np
import pytest

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.manifest import MANIFEST_NAME, seal
from spark_elastic.errors import DataError, DatasetError


def records(dataset, split="train"):
    """Return all records of a split, in order."""
    parts = [dataset.store.read_bytes(shard.file) for shard in dataset.manifest.splits[split]]
    return np.concatenate([np.frombuffer(part, dataset.layout.dtype) for part in parts])


def sidecar_values(dataset, name, split="train"):
    """Return the bytes that each row refers to."""
    found = []
    for shard in dataset.manifest.splits[split]:
        side = dataset.store.read_bytes(shard.sidecar)
        for row in np.frombuffer(dataset.store.read_bytes(shard.file), dataset.layout.dtype)[name]:
            found.append(side[row["start"] : row["start"] + row["length"]])
    return found


def table(rows, start=0):
    numbers = np.arange(start, start + rows)
    return {"x": np.sin(np.outer(numbers, [1, 2, 3])).astype(np.float32), "label_0": numbers}


@pytest.mark.parametrize(("rows", "shards"), [(1, 1), (10, 3), (1000, 7)])
def test_every_row_is_stored_once_and_in_order(tmp_path, rows, shards):
    pack(table(rows), tmp_path, shards=shards)
    dataset = Dataset.open(tmp_path)
    stored = records(dataset)
    assert dataset.rows() == rows
    assert len(dataset.manifest.splits["train"]) == min(rows, shards)
    np.testing.assert_array_equal(stored["label_0"], np.arange(rows))
    np.testing.assert_array_equal(stored["x"], table(rows)["x"])


def test_splits_have_separate_rows(tmp_path):
    dataset = pack(table(100), tmp_path, validation=table(7, start=100), shards=2)
    assert dataset.splits == ("train", "validation")
    assert (dataset.rows("train"), dataset.rows("validation")) == (100, 7)
    assert records(dataset, "validation")["label_0"].tolist() == list(range(100, 107))


def test_a_file_ends_before_it_is_larger_than_shard_bytes(tmp_path):
    rows = 10_000
    dataset = pack({**table(rows), "text": ["ä" * (n % 5) for n in range(rows)]}, tmp_path, shard_bytes=64 << 10)
    shards = dataset.manifest.splits["train"]
    assert len(shards) > 3
    stride = dataset.layout.dtype.itemsize
    assert all((64 << 10) - stride < shard.nbytes <= 64 << 10 for shard in shards[:-1])
    assert [value.decode() for value in sidecar_values(dataset, "text")] == ["ä" * (n % 5) for n in range(rows)]
    np.testing.assert_array_equal(records(dataset)["label_0"], np.arange(rows))


def test_gaps_between_fields_hold_zeros_and_not_what_the_memory_held_before(tmp_path):
    rows = 5000
    columns = {"x": np.ones((rows, 3), np.uint8), "text": ["ab"] * rows}
    for size in range(12, 24):
        [np.full(1 << size, 255, np.uint8) for _ in range(8)].clear()  # memory that the writer may get again
    dataset = pack(columns, tmp_path)
    dtype = dataset.layout.dtype
    gap = np.ones(dtype.itemsize, bool)
    for kind, offset, *_ in dtype.fields.values():
        gap[offset : offset + kind.itemsize] = False
    assert gap.any()
    (shard,) = dataset.manifest.splits["train"]
    stored = np.frombuffer(dataset.store.read_bytes(shard.file), np.uint8).reshape(rows, dtype.itemsize)
    assert not stored[:, gap].any()


def test_dataset_can_be_in_any_store():
    dataset = pack(table(10), "memory://sets/one")
    assert records(Dataset.open("memory://sets/one"))["label_0"].tolist() == list(range(10))
    dataset.delete()
    with pytest.raises(DatasetError, match="holds no manifest"):
        Dataset.open("memory://sets/one")


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"x": np.zeros((2, 3)), "y": np.zeros(3)}, r"must have the same non-zero number of rows.*'x': 2, 'y': 3"),
        ({"x": np.zeros((0, 3))}, "non-zero number of rows"),
        ({"x": np.array(["a", "b"])}, "'x': values of <U1 cannot be stored"),
        ({"x": [b"a", "b"]}, r"a list must have values of one type, not \['bytes', 'str'\]"),
        ({"x": [np.zeros(2), np.zeros(2, np.int8)]}, "one axis and one dtype"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(tmp_path, tensors, complaint):
    with pytest.raises(DataError, match=complaint):
        pack(tensors, tmp_path)
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_validation_must_have_the_layout_of_train(tmp_path):
    with pytest.raises(DataError, match=r"x: <f4\[3\], not x: <f8\[3\]"):
        pack({"x": np.zeros((2, 3), np.float32)}, tmp_path, validation={"x": np.zeros((2, 3))})


def test_dataset_is_not_overwritten(tmp_path):
    pack(table(4), tmp_path)
    with pytest.raises(DatasetError, match="holds a dataset already"):
        pack(table(4), tmp_path)


def test_folder_without_a_manifest_is_refused(tmp_path):
    (tmp_path / "train-00000.rows").write_bytes(b"\0" * 88)
    with pytest.raises(DatasetError, match="writing it did not end"):
        Dataset.open(tmp_path)
    with pytest.raises(DatasetError, match="holds no manifest"):
        Dataset.open(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "sidecar"])
def test_missing_files_and_wrong_sizes_are_reported_as_damage(tmp_path, damage):
    dataset = pack({**table(100), "text": ["abc"] * 100}, tmp_path)
    (shard,) = dataset.manifest.splits["train"]
    path = tmp_path / (shard.sidecar if damage == "sidecar" else shard.file)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content + b"x" if damage == "longer" else content[:-1])
    with pytest.raises(DatasetError, match="the dataset is damaged"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("which", ["file", "sidecar"])
def test_verify_finds_changed_bytes(tmp_path, which):
    dataset = pack({**table(100), "text": ["abc"] * 100}, tmp_path, shards=3)
    dataset.verify()
    path = tmp_path / getattr(dataset.manifest.splits["train"][1], which)
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"has the checksum .* the dataset is damaged"):
        Dataset.open(tmp_path).verify()


def test_files_are_on_the_disk_before_the_manifest_that_lists_them(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(file):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    dataset = pack({**table(100), "text": ["abc"] * 100}, tmp_path, shards=2)
    shards = dataset.manifest.splits["train"]
    files = {os.path.basename(file) for shard in shards for file in (shard.file, shard.sidecar)}
    folder = os.path.basename(tmp_path)
    manifest = next(number for number, name in enumerate(synced) if "manifest.json" in name)
    assert set(synced[:manifest]) - {folder} >= files
    assert synced[manifest - 1] != folder, "the shards' own folder comes before it"
    assert synced[manifest + 1 :] == [folder]


def unsealed(text):
    document = json.loads(text)
    document.pop("checksum", None)
    return json.dumps(document).encode()


def sealed(text):
    """Return a document with the checksum of what is in it, as a manifest with wrong content has it."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    return seal(document) if isinstance(document, dict) else text


def changed(**entries):
    return lambda text: json.dumps({**json.loads(text), **entries}).encode()


def edited(find, replace):
    def edit(text):
        assert find in text
        return text.replace(find, replace)

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda text: b"", "not JSON"),
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: b"\xff\xfe", "not JSON"),
        (lambda text: b"[1, 2]", "its JSON is a list, not an object"),
        (changed(format="parquet"), "not a manifest of spark_elastic.data"),
        (changed(version=2), "format version is 2; this package reads 1"),
        (changed(layout={"version": 9}), "layout version is 9; this package reads 1"),
        (changed(layout=None), "layout is a NoneType"),
        (changed(splits=[1]), r"splits is \[1\], not of dict"),
        (changed(splits={"train": [{"file": "x"}]}), r"splits\.train\[0\] is .*, not a shard"),
        (edited(b'"rows": 100', b'"rows": 99'), "bytes for 99 rows"),
        (edited(b'"rows": 100', b'"rows": "a"'), r"splits\.train\[0\]\.rows is 'a'"),
        (edited(b'"file": "', b'"file": "/etc/'), "not a file of this dataset"),
        (edited(b'"file": "', b'"file": "../'), "not a file of this dataset"),
        (edited(b'"offset": 0', b'"offset": 4'), "offsets or stride"),
    ],
)
def test_invalid_manifest_is_refused_with_the_wrong_field(tmp_path, edit, complaint):
    pack(table(100), tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(sealed(edit(unsealed(path.read_bytes()))))
    with pytest.raises(DatasetError, match=f"{MANIFEST_NAME}: .*{complaint}"):
        Dataset.open(tmp_path)


def test_a_manifest_without_a_checksum_is_refused(tmp_path):
    pack(table(100), tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(unsealed(path.read_bytes()))
    with pytest.raises(DatasetError, match="checksum says None"):
        Dataset.open(tmp_path)


def test_flipped_bit_in_the_manifest_is_found(tmp_path):
    dataset = pack({"x": np.arange(4.0)}, tmp_path)
    path = tmp_path / MANIFEST_NAME
    written = path.read_bytes()
    found = 0
    for at in range(len(written)):
        changed = bytearray(written)
        changed[at] ^= 4
        path.write_bytes(changed)
        try:
            assert Dataset.open(tmp_path) == dataset  # a change of spaces between values is harmless
        except DatasetError:
            found += 1
    assert found > len(written) / 2


def test_a_manifest_that_lost_a_sidecar_is_a_damaged_dataset(tmp_path):
    pack({**table(8), "text": ["abc"] * 8}, tmp_path)
    document = json.loads(unsealed((tmp_path / MANIFEST_NAME).read_bytes()))
    del document["splits"]["train"][0]["sidecar"], document["splits"]["train"][0]["sidecar_nbytes"]
    (tmp_path / MANIFEST_NAME).write_bytes(seal(document))
    with Dataset.open(tmp_path).reader("train", batch_size=3) as reader, pytest.raises(DatasetError) as caught:
        next(iter(reader.epoch(0)))
    assert str(tmp_path) in str(caught.value)
