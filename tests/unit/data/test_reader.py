"""Batches of a materialised dataset: every row once, the same global batches in every world."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data import prefetch
from spark_elastic.data import reader as reader_module
from spark_elastic.data.dataset import pack
from spark_elastic.data.order.windows import WindowSettings
from spark_elastic.data.reader import BatchReader
from spark_elastic.errors import DatasetError, InvalidSettingsError
from tests.integration.processes import wait_until
from tests.leftovers import nothing_left
from tests.unit.data.datasets import labels, numbered

# 24 bytes a row: 512 rows fill whole pages
SHARD_ROWS = st.lists(st.sampled_from([0, 1, 3, 511, 512, 513, 1024, 1500]), max_size=4)
ORDERS = st.sampled_from(
    [{"order": "global"}, {"shuffle": False}, {"order": "lanes", "lanes": WindowSettings(5, 7, 60)}]
)


def assert_whole_rows(batch):
    assert batch.rows == len(batch["label"])
    assert (batch["features"] == batch["label"][:, None] * np.float32([1, 2, 3])).all()


@settings(max_examples=40, deadline=None)
@given(rows=SHARD_ROWS, size=st.integers(1, 6), batch=st.integers(1, 900), order=ORDERS, prefetch=st.integers(0, 3))
def test_each_row_comes_once_and_global_batches_are_those_of_one_rank(
    tmp_path_factory, rows, size, batch, order, prefetch
):
    dataset = numbered(tmp_path_factory.mktemp("set"), rows)
    with BatchReader(dataset, batch_size=batch, prefetch=0, **order) as alone:
        expected = [set(found) for found in labels(alone.epoch(0))]
    readers = [
        BatchReader(dataset, batch_size=batch, rank=rank, size=size, prefetch=prefetch, **order) for rank in range(size)
    ]
    together, position = [], 0
    for parts in zip(*(reader.epoch(0) for reader in readers), strict=True):
        for part in parts:
            assert_whole_rows(part)
            assert (part.start, part.global_rows) == (position, parts[0].global_rows)
        position = parts[0].stop
        found = np.concatenate([part["label"] for part in parts]).tolist()
        assert len(found) == parts[0].global_rows
        together.append(set(found))
    assert together == expected
    assert sorted(row for found in expected for row in found) == list(range(sum(rows)))
    for reader in readers:
        reader.close()


@settings(max_examples=25, deadline=None)
@given(order=ORDERS, prefetch=st.integers(0, 2), data=st.data())
def test_the_world_may_change_between_any_batches_and_a_reader_may_be_replaced(tmp_path_factory, order, prefetch, data):
    dataset = numbered(tmp_path_factory.mktemp("set"), [600, 513])
    options = {"batch_size": 64, "prefetch": prefetch, **order}
    with BatchReader(dataset, **options) as alone:
        expected = [set(found) for found in labels(alone.epoch(3))]
    size, seen = 2, []
    readers = [BatchReader(dataset, rank=rank, size=size, **options) for rank in range(size)]
    epochs = [reader.epoch(3) for reader in readers]
    while len(seen) < len(expected):
        parts = [next(epoch) for epoch in epochs]
        seen.append({row for part in parts for row in part["label"].tolist()})
        new = data.draw(st.integers(1, 4))
        for gone in readers[new:]:
            gone.close()
        readers, epochs = readers[:new], epochs[:new]
        shares = data.draw(st.none() | st.lists(st.integers(1, 9), min_size=new, max_size=new))
        for rank, reader in enumerate(readers):
            reader.set_world(rank, new, shares)
        for rank in range(len(readers), new):  # a rank that joins knows only the position
            readers.append(BatchReader(dataset, **options))
            readers[-1].set_world(rank, new, shares)
            epochs.append(readers[-1].epoch(3, parts[0].stop))
    assert seen == expected
    assert [next(epoch, None) for epoch in epochs] == [None] * len(epochs)
    for reader in readers:
        reader.close()


def test_without_a_shuffle_rows_come_in_file_order(tmp_path):
    dataset = numbered(tmp_path, [513, 700, 3])
    with dataset.reader(batch_size=100, shuffle=False) as reader:
        assert [row for batch in labels(reader.epoch(0)) for row in batch] == list(range(1216))


def test_epochs_and_seeds_differ_and_repeat(tmp_path):
    dataset = numbered(tmp_path, [300])

    def read(seed, epoch):
        with dataset.reader(batch_size=300, seed=seed) as reader:
            return labels(reader.epoch(epoch))[0]

    assert read(0, 0) == read(0, 0)
    assert len({tuple(read(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_windowed_shuffle_does_not_depend_on_the_batch_size(tmp_path):
    dataset = numbered(tmp_path, [3000])

    def read(batch_size):
        with dataset.reader(batch_size=batch_size, order="lanes") as reader:
            return [row for batch in labels(reader.epoch(0)) for row in batch]

    assert read(96) == read(100) == read(3000)


def test_a_rank_without_rows_in_a_last_short_batch_still_gets_the_batch(tmp_path):
    with numbered(tmp_path, [10]).reader(batch_size=8, rank=0, size=4) as reader:
        assert [(batch.rows, batch.global_rows) for batch in reader.epoch(0)] == [(2, 8), (0, 2)]


def test_batches_contain_the_chosen_fields(tmp_path):
    dataset = pack({"a": np.arange(10.0), "b": np.arange(10), "text": [str(i) for i in range(10)]}, tmp_path)
    with dataset.reader(batch_size=10, fields=["b", "text"]) as reader:
        (batch,) = reader.epoch(0)
    assert sorted(batch.tensors) == ["b", "text"]
    assert batch["text"] == [str(row) for row in batch["b"]]


def test_values_of_variable_length_come_with_their_rows(tmp_path):
    rows = 700
    random = np.random.default_rng(0)
    dense = random.random((rows, 9)) * (random.random((rows, 9)) < 0.3)
    values = {
        "id": np.arange(rows),
        "raw": [bytes([row % 256]) * (row % 5) for row in range(rows)],
        "text": ["ä" * (row % 4) + str(row) for row in range(rows)],
        "ragged": [np.arange(row % 6, dtype=np.float32) + row for row in range(rows)],
        "sparse": dense,
        "sparse32": dense.astype(np.float32),
    }
    dataset = pack(values, tmp_path, sparse=["sparse", "sparse32"], shards=3)
    seen = 0
    with dataset.reader(batch_size=64, order="lanes") as reader:
        for batch in reader.epoch(1):
            for index, row in enumerate(batch["id"].tolist()):
                assert batch["raw"][index] == values["raw"][row]
                assert batch["text"][index] == values["text"][row]
                assert batch["ragged"][index].tolist() == values["ragged"][row].tolist()
                assert batch["ragged"][index].dtype == np.float32
            assert (batch["sparse"] == dense[batch["id"]]).all()
            assert (batch["sparse32"] == dense[batch["id"]].astype(np.float32)).all()
            seen += batch.rows
    assert seen == rows


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_rank_without_rows_gets_empty_tensors_of_every_kind(tmp_path, prefetch):
    values = {"id": np.arange(5), "text": ["a"] * 5, "ragged": [np.arange(3)] * 5, "sparse": np.eye(5, 7)}
    dataset = pack(values, tmp_path, sparse=["sparse"])
    with dataset.reader(batch_size=4, rank=0, size=4, prefetch=prefetch) as reader:
        batch = next(reader.epoch(0, 4))
    assert (batch.rows, batch.global_rows, batch["text"], batch["ragged"]) == (0, 1, [], [])
    assert batch["sparse"].shape == (0, 7)


def test_batches_that_are_kept_keep_their_values(tmp_path):
    with numbered(tmp_path, [50_000]).reader(batch_size=512) as reader:
        kept = [batch["features"][3:5] for batch in reader.epoch(0)]
        copies = [values.copy() for values in kept]
        for _ in reader.epoch(1):
            pass
    assert all((values == copy).all() for values, copy in zip(kept, copies, strict=True))


def test_unreferenced_buffers_are_used_again(tmp_path):
    with numbered(tmp_path, [200_000]).reader(batch_size=20_000) as reader:
        addresses = {batch["label"].__array_interface__["data"][0] for batch in reader.epoch(0)}
    assert len(addresses) < 10


def test_abandoned_pass_does_not_disturb_the_next_one(tmp_path):
    dataset = numbered(tmp_path, [30_000])
    with dataset.reader(batch_size=256) as reader:
        left = [reader.epoch(number) for number in range(3)]
        for epoch in left:
            next(epoch)
        seen = []
        for batch in reader.epoch(3):
            assert_whole_rows(batch)
            seen += batch["label"].tolist()
            for epoch in left:
                assert_whole_rows(next(epoch, batch))
    assert sorted(seen) == list(range(30_000))


# --- what can go wrong --------------------------------------------------------------------------


def test_a_truncated_shard_is_refused_before_it_is_mapped(tmp_path):
    dataset = numbered(tmp_path, [512, 600])
    os.truncate(tmp_path / "1.rows", 600 * 24 - 5)
    with pytest.raises(DatasetError, match=r"1\.rows has 14395 bytes, the manifest says 14400"):
        dataset.reader(batch_size=10)


def test_truncated_sidecar_is_refused_only_if_it_is_read(tmp_path):
    dataset = pack({"id": np.arange(9), "text": ["some"] * 9}, tmp_path)
    os.truncate(tmp_path / dataset.manifest.splits["train"][0].sidecar, 3)
    with pytest.raises(DatasetError, match="3 bytes, the manifest says 36"):
        dataset.reader(batch_size=3)
    with dataset.reader(batch_size=3, fields=["id"]) as reader:
        assert sum(batch.rows for batch in reader.epoch(0)) == 9


@pytest.mark.parametrize("prefetch", [0, 2])
def test_error_while_gathering_is_raised_after_the_batches_before_it(tmp_path, prefetch, monkeypatch):
    monkeypatch.setenv("SPARK_ELASTIC_CHECK_ROWS", "off")  # otherwise the checksum is reported first
    dataset = pack({"id": np.arange(40_000), "text": ["some"] * 40_000}, tmp_path)
    shard = tmp_path / dataset.manifest.splits["train"][0].file
    records = np.fromfile(shard, dataset.layout.dtype)
    records["text"]["start"][39_999] = 10**9
    records.tofile(shard)
    with dataset.reader(batch_size=1000, shuffle=False, prefetch=prefetch) as reader:
        seen = []
        with pytest.raises(DatasetError, match="beyond the end of its sidecar"):
            seen.extend(reader.epoch(0))
        assert sum(batch.rows for batch in seen) in range(16_000, 40_000)
        assert next(reader.epoch(0)).rows == 1000  # and nothing hangs


def maps_of(folder):
    with open("/proc/self/maps") as maps:
        return sum(str(folder) in line for line in maps)


def test_readers_leave_no_threads_descriptors_or_maps_behind_wherever_they_are_stopped(tmp_path):
    dataset = numbered(tmp_path, [512] * 20 + [7] * 20)
    with nothing_left():
        for stop_after in (0, 1, 7):
            reader = dataset.reader(batch_size=300)
            epoch = reader.epoch(0)
            for _ in range(stop_after):
                next(epoch)
            assert maps_of(tmp_path) <= 40
            reader.close()
            reader.close()
        reader = dataset.reader(batch_size=300)
        next(reader.epoch(0))  # a consumer that closes neither of the two
        del reader
    assert maps_of(tmp_path) == 0


def test_closed_reader_raises(tmp_path):
    reader = numbered(tmp_path, [100]).reader(batch_size=10)
    epoch = reader.epoch(0)
    next(epoch)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        next(epoch)
    with pytest.raises(ValueError, match="closed"):
        reader.epoch(0)


def test_reader_that_is_closed_as_an_epoch_starts_raises(tmp_path, monkeypatch):
    reader = numbered(tmp_path, [100]).reader(batch_size=10)

    class ClosedAtOnce(prefetch.Prefetcher):
        def __init__(self, *args):
            super().__init__(*args)
            wait_until(self._ready.qsize, 20, "rows are gathered")
            reader.close()

    monkeypatch.setattr(reader_module, "Prefetcher", ClosedAtOnce)
    with nothing_left(), pytest.raises(ValueError, match="closed"):
        next(reader.epoch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"rank": 2, "size": 2}, "rank must be from 0 to 1 with size=2, not 2"),
        ({"prefetch": -1}, "prefetch"),
        ({"order": "random"}, "order must be"),
        ({"order": "lanes", "shuffle": False}, "shuffle"),
        ({"fields": ["labl"]}, "did you mean 'label'"),
        ({"split": "test"}, "no split 'test'; its splits are 'train'"),
    ],
)
def test_invalid_options_are_refused_with_the_valid_ones(tmp_path, options, message):
    with pytest.raises(InvalidSettingsError, match=message):
        numbered(tmp_path, [10]).reader(**{"batch_size": 4, **options})
