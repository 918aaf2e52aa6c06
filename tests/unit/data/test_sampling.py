"""The order of an epoch and its division among ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.order.permutation import EpochOrder, needs_padding, rows_done, share


def test_an_order_never_changes_between_versions():
    assert EpochOrder(10, 0, 0)[np.arange(10)].tolist() == [7, 3, 4, 6, 5, 1, 2, 8, 9, 0]
    assert EpochOrder(10, 0, 0, shuffle=False)[np.arange(10)].tolist() == list(range(10))


@given(left=st.integers(0, 10_000), size=st.integers(1, 50))
def test_shares_add_up_and_differ_by_at_most_one_row(left, size):
    shares = [share(left, rank, size) for rank in range(size)]
    assert sum(shares) == left
    assert max(shares) - min(shares) <= 1


@given(left=st.integers(0, 2000), size=st.integers(1, 9), batch=st.integers(1, 40))
def test_padding_gives_all_ranks_equally_many_steps_and_repeats_fewer_rows_than_ranks(left, size, batch):
    padding = [needs_padding(left, rank, size, batch) for rank in range(size)]
    steps = {-(-(share(left, rank, size) + padding[rank]) // batch) for rank in range(size)}
    assert len(steps) == 1
    assert sum(padding) < size


@given(left=st.integers(0, 2000), size=st.integers(1, 9), part=st.integers(1, 12), passes=st.integers(1, 4))
def test_ranks_that_work_through_batches_in_parts_have_equally_many_parts(left, size, part, passes):
    padding = [needs_padding(left, rank, size, part * passes, passes) for rank in range(size)]
    taken = [share(left, rank, size) + padding[rank] for rank in range(size)]
    assert len({-(-rows // part) for rows in taken}) == 1
    assert len({-(-rows // (part * passes)) for rows in taken}) == 1
    assert sum(padding) < size


@settings(max_examples=300)
@given(data=st.data(), rows=st.integers(1, 400), batch=st.integers(1, 17))
def test_each_row_is_done_once_over_any_number_of_changes_and_all_ranks_agree_on_what_is_done(data, rows, batch):
    done, seen = 0, []
    while done < rows:
        size = data.draw(st.integers(1, 6))
        left = rows - done
        padded = [needs_padding(left, rank, size, batch) for rank in range(size)]
        shares = [share(left, rank, size) for rank in range(size)]
        total_steps = -(-max(shares) // batch)
        steps = data.draw(st.integers(1, total_steps))
        told = set()
        for rank in range(size):
            taken = min(steps * batch, shares[rank] + padded[rank])
            seen += [done + rank + i * size for i in range(min(taken, shares[rank]))]
            told.add(rows_done(rows, done, taken, rank, size, padded[rank]))
        assert len(told) == 1
        (done,) = told
    assert sorted(seen) == list(range(rows))
