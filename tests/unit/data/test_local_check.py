"""Files of a local dataset are compared with the manifest's checksums: each once for all processes of a host."""

from pathlib import Path

import numpy as np
import pytest

from spark_elastic.data.dataset import pack
from spark_elastic.errors import DatasetError, InvalidSettingsError
from tests.leftovers import nothing_left


def make(folder, rows=3000):
    return pack({"x": np.arange(rows), "text": ["word"] * rows}, folder, shards=3)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("which", ["file", "sidecar"])
def test_flipped_bit_is_reported_at_the_end_of_the_epoch(tmp_path, which):
    dataset = make(tmp_path)
    damaged = getattr(dataset.manifest.splits["train"][1], which)
    flip(tmp_path / damaged)
    with (
        nothing_left(),
        dataset.reader(batch_size=100) as reader,
        pytest.raises(DatasetError, match=f"{damaged} has the checksum .* the manifest says .*write it again"),
    ):
        for _ in reader.epoch(0):
            pass


def test_checked_reports_damage_before_the_end_of_an_epoch(tmp_path):
    dataset = make(tmp_path)
    flip(tmp_path / dataset.manifest.splits["train"][2].file)
    with dataset.reader(batch_size=3000) as reader:
        with pytest.raises(DatasetError):
            reader.checked()
        with pytest.raises(DatasetError):
            next(reader.epoch(1))


def checked(dataset):
    with dataset.reader(batch_size=1000) as reader:
        assert reader.checked()


def read_by(dataset, monkeypatch):
    """Return a list to which each file that is read for its checksum is added."""
    read = []
    real = Path.open

    def opened(path, *args, **kwargs):
        if path.suffix in (".rows", ".side"):
            read.append(str(path.relative_to(dataset.store.local_path())))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    return read


def test_files_are_compared_once_and_again_after_a_change(tmp_path, monkeypatch):
    dataset = make(tmp_path)
    read = read_by(dataset, monkeypatch)
    checked(dataset)
    assert sorted(read) == sorted(dataset.manifest.files)
    read.clear()
    checked(dataset)
    assert read == []
    written_to = dataset.manifest.splits["train"][0].file
    (tmp_path / written_to).write_bytes((tmp_path / written_to).read_bytes())
    read.clear()
    checked(dataset)
    assert read == [written_to]


def test_read_only_dataset_is_compared_too(tmp_path):
    dataset = make(tmp_path)
    (tmp_path / "checked").write_text("in the way of the notes")
    checked(dataset)
    flip(tmp_path / dataset.manifest.splits["train"][0].file)
    with pytest.raises(DatasetError):
        checked(dataset)


def test_comparison_can_be_switched_off(tmp_path, monkeypatch):
    dataset = make(tmp_path)
    flip(tmp_path / dataset.manifest.splits["train"][0].file)
    monkeypatch.setenv("SPARK_ELASTIC_CHECK_ROWS", "off")
    checked(dataset)
    monkeypatch.setenv("SPARK_ELASTIC_CHECK_ROWS", "no")
    with pytest.raises(InvalidSettingsError, match="must be 'on' or 'off', not 'no'"):
        checked(dataset)
