"""Rows are requested, waited for and released while an epoch is read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.order.permutation import GlobalOrder
from spark_elastic.data.order.windows import WindowedShuffle, WindowSettings
from spark_elastic.data.prefetch import ReadAhead

ROWS = 400


class Recording:
    """A source that records which rows are requested, and which are local."""

    def __init__(self, preload_always=False):
        self.preload_always = preload_always
        self.open = {}
        self.there = set()
        self.most = 0
        self.all = 0

    def request(self, ranges):
        token = object()
        self.open[token] = {row for start, stop in ranges for row in range(start, stop)}
        self.most = max(self.most, sum(map(len, self.open.values())))
        return token

    def wait(self, token, stopping):
        self.there |= self.open[token]

    def release(self, token):
        self.there -= self.open.pop(token)

    def preload(self, stopping):
        self.all += 1


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 600),
    lanes=st.builds(
        WindowSettings, lanes=st.integers(1, 9), chunk_rows=st.integers(1, 20), window_rows=st.integers(1, 60)
    ),
    turn=st.integers(1, 90),
    size=st.integers(1, 4),
    position=st.integers(0, 300),
)
def test_requested_rows_are_local_when_gathered_and_released_after_two_windows(rows, lanes, turn, size, position):
    order, source = WindowedShuffle(rows, 1, 1, lanes), Recording()
    ahead = ReadAhead(source, ROWS)
    for start in range(position, rows, turn):
        stop = min(rows, start + turn)
        ahead.prepare(order, start, stop, 0, size)
        assert set(order.take([start, stop], 0, size)[0].tolist()) <= source.there
    # of each stream the rows of a group of batches, rounded up to windows, and one more window
    window = 2 * lanes.window_rows
    assert source.most <= lanes.lanes * (-(-turn // lanes.lanes) + 1 + 3 * window)
    ahead.release_all()
    assert source.open == {}


def test_new_epoch_or_world_releases_the_old_windows():
    lanes = WindowSettings(4, 5, 20)
    source = Recording()
    ahead = ReadAhead(source, ROWS)
    for epoch, rank, size in ((0, 0, 1), (1, 0, 1), (1, 1, 2)):
        order = WindowedShuffle(400, 0, epoch, lanes)
        ahead.prepare(order, 40, 60, rank, size)
        mine = set(order.take([0, 400], rank, size)[0].tolist())
        assert source.open
        assert all(wanted <= mine for wanted in source.open.values())


@given(rows=st.integers(0, 160), turn=st.integers(1, 30))
def test_rows_in_file_order_are_requested_a_few_parts_at_a_time(rows, turn):
    order, source = GlobalOrder(rows, 0, 0, shuffle=False), Recording()
    ahead = ReadAhead(source, rows, part_rows=20)
    for start in range(0, rows, turn):
        stop = min(rows, start + turn)
        ahead.prepare(order, start, stop, 0, 1)
        assert set(range(start, stop)) <= source.there
    assert source.all == 0
    assert source.most <= turn + 5 * 20
    ahead.release_all()
    assert source.open == {}


def test_permutation_preloads_everything_once():
    source = Recording()
    ahead, order = ReadAhead(source, ROWS), GlobalOrder(100, 0, 0)
    for start in (0, 10):
        ahead.prepare(order, start, start + 10, 0, 1)
    assert (source.all, source.open) == (1, {})
