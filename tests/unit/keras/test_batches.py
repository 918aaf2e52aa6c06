"""Which rows a member takes, and the tensors of them."""

from __future__ import annotations

import numpy as np
import pytest

from spark_elastic.data.order.permutation import EpochOrder
from spark_elastic.keras.elastic.batches import DealtRows, TensorFlowBatches, deal


@pytest.mark.parametrize(("rows", "batches", "size"), [(90, 10, 3), (7, 7, 3), (11, 3, 5), (64, 1, 1), (5, 2, 4)])
def test_members_share_each_batch_and_each_has_a_row(rows, batches, size):
    order = EpochOrder(rows, 3, 1)
    whole = order[np.arange(rows)]
    members = [deal(order, range(batches), batches, rank, size) for rank in range(size)]
    for number in range(batches):
        part = whole[number * rows // batches : (number + 1) * rows // batches].tolist()
        taken = [shares[number].tolist() for shares in members]
        assert all(taken)
        assert {row for each in taken for row in each} == set(part)
        if len(part) >= size:
            assert sorted(row for each in taken for row in each) == sorted(part)
            assert taken == [part[rank::size] for rank in range(size)]


def shares_of(*batches):
    edges = np.cumsum([0, *map(len, batches)], dtype=np.int64)
    return DealtRows(np.array([row for batch in batches for row in batch], np.int64), edges)


def test_each_iterator_has_the_rows_that_were_set_last_and_ends():
    batches = TensorFlowBatches((np.arange(10), np.arange(10) * 2))
    batches.set_rows(shares_of([1, 2], [7]))
    assert [x.numpy().tolist() for x, _ in batches] == [[1, 2], [7]]
    next(iter(batches))  # left before its end
    batches.set_rows(shares_of([5]))
    assert [(x.numpy().tolist(), y.numpy().tolist()) for x, y in batches] == [([5], [10])]
    batches.set_rows(shares_of())
    assert list(batches) == []
