"""Rows are read by number, each shard's rows once, from shards that are mapped one by one."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.rows import MappedFiles, Numbering, ShardRows
from spark_elastic.errors import DatasetError
from tests.unit.data.datasets import LAYOUT, numbered

SHARD_ROWS = st.lists(st.sampled_from([0, 1, 5, 511, 512, 513]), max_size=5)


@given(shard_rows=SHARD_ROWS, data=st.data())
def test_numbers_count_through_the_shards_and_ranges_are_parts_of_them(shard_rows, data):
    numbering = Numbering(shard_rows)
    every = [(shard, row) for shard, count in enumerate(shard_rows) for row in range(count)]
    shards, rows = numbering.places(np.arange(numbering.rows))
    assert list(zip(shards.tolist(), rows.tolist(), strict=True)) == every
    start = data.draw(st.integers(0, numbering.rows))
    stop = data.draw(st.integers(start, numbering.rows))
    found = [(shard, row) for shard, first, last in numbering.ranges(start, stop) for row in range(first, last)]
    assert found == every[start:stop]


@settings(max_examples=20, deadline=None)
@given(shard_rows=SHARD_ROWS, seed=st.integers(0, 9))
def test_records_are_gathered_from_the_shards_also_after_they_were_evicted(tmp_path_factory, shard_rows, seed):
    folder = tmp_path_factory.mktemp("set")
    shards = numbered(folder, shard_rows).manifest.splits["train"]
    numbering = Numbering([shard.rows for shard in shards])
    numbers = np.random.default_rng(seed).permutation(numbering.rows)
    files = MappedFiles([folder / shard.file for shard in shards], [shard.nbytes for shard in shards])
    rows = ShardRows(files, numbering, LAYOUT.stride)
    for _ in range(2):
        out = np.empty(len(numbers), np.dtype((np.void, LAYOUT.stride)))
        rows.gather(numbers, out)
        assert out.view(LAYOUT.dtype)["label"].tolist() == numbers.tolist()
        rows.evict(0, numbering.rows)
    files.close()


def test_missing_or_truncated_shard_is_refused_before_it_is_read(tmp_path):
    (shard,) = numbered(tmp_path, [100]).manifest.splits["train"]
    os.truncate(tmp_path / shard.file, 99 * 24)
    with pytest.raises(DatasetError, match="2376 bytes, the manifest says 2400"):
        MappedFiles([tmp_path / shard.file], [2400])
    with pytest.raises(DatasetError, match="gone cannot be read"):
        MappedFiles([tmp_path / "gone"], [2400])


def test_shut_or_closed_file_is_unmapped(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(8192))
    files = MappedFiles([tmp_path / "a", None, tmp_path / "b"], [8192, 0, 8192], later=True)
    assert [len(files[shard]) for shard in range(3)] == [0, 0, 0]
    for shard in range(3):
        files.open(shard)
    assert [len(files[shard]) for shard in range(3)] == [8192, 0, 8192]
    files.shut(0)
    assert len(files[0]) == 0
    files.close()
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            assert not [line for line in maps if str(tmp_path) in line]
