"""Rows are read by number, each shard's rows once, mapped side by side or gathered shard by shard."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.rows import FileRange, FileSegment, GatheredRows, MappedRows, Numbering, Placement, can_map
from spark_elastic.errors import DatasetError
from tests.unit.data.datasets import LAYOUT, numbered

RUN = LAYOUT.rows_per_page_run
SHARD_ROWS = st.lists(st.sampled_from([0, 1, 5, RUN - 1, RUN, RUN + 1, 3 * RUN]), max_size=5)
mapped_here = pytest.mark.skipif(not can_map(), reason="files are gathered one by one on this system")


LARGE = (2 << 20) // LAYOUT.stride + 1


@given(
    shard_rows=st.lists(st.sampled_from([0, 1, RUN, 3 * RUN + 5, LARGE, 2 * LARGE + RUN]), max_size=5),
    huge=st.booleans(),
)
def test_places_do_not_overlap_and_large_shards_begin_at_huge_pages(shard_rows, huge):
    numbering = Numbering(shard_rows, RUN)
    placement = Placement(numbering, LAYOUT.stride, huge=huge)
    numbers = np.arange(numbering.rows)
    expected = [np.arange(e.rows) + start for e, start in zip(numbering.extents, placement.starts, strict=True)]
    expected = np.concatenate([np.empty(0, np.int64), *expected])
    assert (placement.of(numbers) == expected).all()
    assert (numbers == np.arange(numbering.rows)).all()  # they are the caller's
    assert len(set(expected.tolist())) == numbering.rows
    assert expected.max(initial=-1) < placement.rows or not numbering.rows
    for extent, start in zip(numbering.extents, placement.starts, strict=True):
        large = extent.rows * LAYOUT.stride >= 2 << 20
        assert start * LAYOUT.stride % (2 << 20 if huge and large else 4096) == 0


@pytest.mark.parametrize(
    ("shard_rows", "run", "stride"),
    [
        ([RUN << 20] * 2, RUN, LAYOUT.stride),  # a table with too many entries
        ([4096] * 600, 4096, 4095),  # too many addresses: an odd stride meets a huge page every 8 GB
    ],
)
def test_shards_join_without_gaps_if_gaps_would_cost_too_much(shard_rows, run, stride):
    placement = Placement.best(Numbering(shard_rows, run), stride)
    assert placement.starts == np.cumsum([0, *shard_rows[:-1]]).tolist()
    fewer = Placement.best(Numbering([4096] * 3, 4096), 4095)
    assert fewer.starts[1] == 2 << 20


@mapped_here
@settings(max_examples=20, deadline=None)
@given(shard_rows=SHARD_ROWS, seed=st.integers(0, 9))
def test_mapped_and_gathered_rows_have_the_same_records(tmp_path_factory, shard_rows, seed):
    folder = tmp_path_factory.mktemp("set")
    shards = numbered(folder, shard_rows).manifest.splits["train"]
    numbering = Numbering(shard_rows, RUN)
    numbers = np.random.default_rng(seed).permutation(numbering.rows)
    found = []
    for kind in (MappedRows, GatheredRows):
        files = [folder / shard.file for shard in shards]
        rows = kind(files, numbering, LAYOUT.stride, [shard.nbytes for shard in shards])
        out = np.empty(len(numbers), np.dtype((np.void, LAYOUT.stride)))
        rows.gather(rows.places(numbers), out)
        rows.evict(0, numbering.rows)
        rows.close()
        found.append(out.view(LAYOUT.dtype)["label"].tolist())
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(numbering.rows))


def test_gathering_also_refuses_a_truncated_shard(tmp_path):
    (shard,) = numbered(tmp_path, [100]).manifest.splits["train"]
    os.truncate(tmp_path / shard.file, 99 * 24)
    with pytest.raises(DatasetError, match="2376 bytes, the manifest says 2400"):
        GatheredRows([tmp_path / shard.file], Numbering([100], RUN), 24, [2400])


@mapped_here
def test_failed_mapping_leaves_nothing_mapped(tmp_path):
    (tmp_path / "a").write_bytes(bytes(8192))
    good, missing = (FileSegment(tmp_path / name, 0, 8192, at, 8192) for name, at in (("a", 0), ("b", 8192)))
    with pytest.raises(DatasetError, match="b cannot be read"):
        FileRange([good, missing])
    with pytest.raises(OSError, match="cannot map") as failed:
        FileRange([FileSegment(tmp_path / "a", 1, 8192, 0, 8192)])  # not the beginning of a page
    assert failed.value.errno == errno.EINVAL
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(tmp_path) in line]
