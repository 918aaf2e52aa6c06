"""A computed permutation contains each row once, never changes, and mixes as well as a shuffle."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_elastic.data.order.permutation import Permutation, derived_key

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=60)
@example(rows=4096, key=0)
@example(rows=4097, key=0)
@given(rows=st.integers(0, 70_000), key=KEYS)
def test_each_row_has_one_position(rows, key):
    order = Permutation(rows, key)[np.arange(rows)]
    assert (np.bincount(order, minlength=rows) == 1).all()
    assert len(order) == rows


@given(rows=st.integers(4097, 2**40), key=KEYS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_part_of_a_large_permutation_equals_that_of_the_whole(rows, key, data):
    permutation = Permutation(min(rows, 10**10), key)
    start = data.draw(st.integers(0, permutation.rows - 2000))
    part = permutation[np.arange(start, start + 2000)]
    picked = np.array(data.draw(st.lists(st.integers(0, 1999), max_size=20)), np.int64)
    assert permutation[picked + start].tolist() == part[picked].tolist()
    assert len(np.unique(part)) == 2000
    assert part.min() >= 0
    assert part.max() < permutation.rows


def test_it_never_changes_between_versions():
    assert Permutation(10, 0)[np.arange(10)].tolist() == [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]
    assert Permutation(10**9, 7)[np.array([0, 1, 10**9 - 1])].tolist() == [194013689, 778289018, 870188484]


def test_all_orders_of_a_few_rows_are_about_equally_likely():
    counts = {}
    for key in range(12_000):
        order = tuple(Permutation(4, derived_key(key))[np.arange(4)].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 60  # 23 degrees of freedom


@pytest.mark.parametrize("rows", [5_000, 65_536, 1_000_003])
def test_batches_of_sorted_rows_vary_as_much_as_those_of_a_shuffle(rows):
    """Compare batch means, class counts and correlations of neighbours with those of independent draws."""
    batch = 512
    means, pairs, cells = [], [], np.zeros(100)
    for key in range(1_000_000 // rows + 1):
        order = Permutation(rows, derived_key(key))[np.arange(rows)]
        means += order[: rows // batch * batch].reshape(-1, batch).mean(1).tolist()
        pairs.append(np.corrcoef(order[:-1], order[1:])[0, 1])
        cells += np.histogram2d(np.arange(rows), order, bins=10)[0].reshape(-1) / rows
    expected = (rows**2 / 12) / batch * (1 - batch / rows)  # without replacement
    assert abs(np.var(means) / expected - 1) < 0.15
    assert abs(np.mean(pairs)) < 4 / np.sqrt(1_000_000)
    assert abs(cells / cells.sum() * 100 - 1).max() < 0.06
