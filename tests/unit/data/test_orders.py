"""Orders of an epoch: each row once however often the world changes, and the same global batches in every world."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.order.permutation import GlobalOrder
from spark_elastic.data.order.windows import WindowedShuffle, WindowSettings

LANES = st.builds(
    WindowSettings, lanes=st.integers(1, 20), chunk_rows=st.integers(1, 40), window_rows=st.integers(1, 90)
)


@st.composite
def orders(draw, rows=None):
    rows = draw(st.integers(0, 700)) if rows is None else rows
    seed, epoch = draw(st.integers(-5, 5)), draw(st.integers(0, 3))
    lanes, shuffle = draw(st.none() | LANES), draw(st.booleans())
    if lanes is None:
        return lambda: GlobalOrder(rows, seed, epoch, shuffle)
    return lambda: WindowedShuffle(rows, seed, epoch, lanes)


def whole(order):
    return order.take([0, order.rows], 0, 1)[0]


@settings(max_examples=60, deadline=None)
@given(make=orders(), data=st.data())
def test_each_row_comes_once_and_global_batches_are_the_same_however_the_world_changes(make, data):
    one = make()
    everything = whole(one)
    assert sorted(everything.tolist()) == list(range(one.rows))
    held: dict[int, object] = {}  # each rank has its own order object
    position = 0
    while position < one.rows:
        size = data.draw(st.integers(1, 24))  # also more ranks than streams, or than rows of a batch
        edges = [position]
        for _ in range(data.draw(st.integers(1, 4))):
            edges.append(min(one.rows, edges[-1] + data.draw(st.integers(1, 150))))
        position = edges[-1]
        held |= {rank: make() for rank in range(size) if rank not in held}
        shares = data.draw(st.none() | st.lists(st.integers(0, 40), min_size=size, max_size=size).filter(any))
        parts = [
            np.split(rows, np.cumsum(counts))
            for rows, counts in (held[r].take(edges, r, size, shares) for r in range(size))
        ]
        for number, (start, stop) in enumerate(pairwise(edges)):
            batch = np.concatenate([part[number] for part in parts])
            assert sorted(batch.tolist()) == sorted(everything[start:stop].tolist())


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 600), lanes=LANES, size=st.integers(1, 9))
def test_rank_reads_only_what_the_windows_of_its_streams_cover(rows, lanes, size):
    order = WindowedShuffle(rows, 1, 2, lanes)
    seen = []
    for rank in range(size):
        first, last = order.owned(rank, size)
        taken = order.take([0, rows], rank, size)[0].tolist()
        covered = []
        for lane in range(first, last):
            index, length = 0, order.lengths[lane]
            while index < length:
                _, start, stop = order.window_at(lane, index)
                assert start == index < stop
                for begin, end in order.window_ranges(lane, start, stop):
                    covered += range(begin, end)
                index = stop
        assert sorted(taken) == sorted(covered)
        seen += taken
    assert sorted(seen) == list(range(rows))


def test_ranks_take_equal_parts_of_batches_that_the_streams_divide():
    order = WindowedShuffle(100_000, 0, 0, WindowSettings(64, 256, 4096))
    for size in (1, 2, 4, 8, 64):
        assert {len(order.take([1024, 2048], rank, size)[0]) for rank in range(size)} == {1024 // size}


def test_orders_differ_between_seeds_and_epochs():
    settings_ = WindowSettings(8, 16, 200)
    for kind in (GlobalOrder, lambda *key: WindowedShuffle(*key, settings_)):
        made = [whole(kind(2000, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
        for i, a in enumerate(made):
            assert all((a == b).sum() < 30 for b in made[:i])


@pytest.mark.parametrize(("window", "bound"), [(1 << 20, 1.15), (32_768, 1.15)])
def test_batches_of_sorted_rows_vary_hardly_more_than_those_of_a_shuffle(window, bound):
    rows, batch = 1_000_000, 1024
    order = WindowedShuffle(rows, 3, 0, WindowSettings(64, 1024, window))
    batches = whole(order)[: rows // batch * batch].reshape(-1, batch)
    of_ten = np.stack([(batches // (rows // 10) == label).sum(1) for label in range(10)])
    assert of_ten.var(1).mean() / (batch * 0.09) < bound


def test_an_epoch_of_a_billion_rows_can_be_entered_in_the_middle():
    order = WindowedShuffle(10**9, 0, 5, WindowSettings(64, 4096, 1 << 17))
    rows = order.take([500_000_000, 500_001_024], 1, 2)[0]
    assert len(np.unique(rows)) == 512


def test_windowed_shuffle_never_changes_between_versions():
    assert whole(WindowedShuffle(12, 0, 0, WindowSettings(3, 2, 3))).tolist() == [4, 6, 2, 1, 11, 3, 0, 7, 8, 5, 10, 9]
