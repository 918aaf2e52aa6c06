"""The order of an epoch and its division among ranks."""

import numpy as np

from spark_elastic.data.order.permutation import EpochOrder


def test_an_order_never_changes_between_versions():
    assert EpochOrder(10, 0, 0)[np.arange(10)].tolist() == [7, 3, 4, 6, 5, 1, 2, 8, 9, 0]
    assert EpochOrder(10, 0, 0, shuffle=False)[np.arange(10)].tolist() == list(range(10))
