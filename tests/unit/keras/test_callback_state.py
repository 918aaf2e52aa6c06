"""The plain values of callbacks are compared by their contents."""

import numpy as np

from spark_elastic.keras.callback_state import same


def test_values_are_compared_by_content():
    assert same(np.arange(3), np.arange(3))
    assert not same(np.arange(3), np.arange(4))
    assert not same(np.arange(3), np.arange(4.0)[:2])
    assert same({"a": [np.ones(2), (1, "x")]}, {"a": [np.ones(2), (1, "x")]})
    assert not same({"a": [np.ones(2), (1, "x")]}, {"a": [np.ones(2), (1, "y")]})
    assert not same({"a": 1}, {"b": 1})
    assert not same([1], [1, 2])
    assert not same(1, 1.0)
    assert same(float("nan"), float("nan"))
