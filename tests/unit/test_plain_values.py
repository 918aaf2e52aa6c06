"""Plain values are compared by their contents."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from spark_elastic.elastic.plain_values import independent_copy, same


def test_values_are_compared_by_content():
    one, other = SimpleNamespace(a=[1, 2]), SimpleNamespace(a=[1, 2])
    assert same(one, other)
    assert same(np.arange(3), np.arange(3))
    assert not same(np.arange(3), np.arange(4))
    assert same({"a": np.ones(2)}, {"a": np.ones(2)})
    assert not same(1, 1.0)
    assert same(float("nan"), float("nan"))


@dataclass
class Ended:
    epoch: int
    seconds: float = field(compare=False)


def test_fields_that_an_objects_own_comparison_ignores_are_compared():
    assert Ended(1, 2.0) == Ended(1, 3.0)
    assert not same(Ended(1, 2.0), Ended(1, 3.0))
    assert same([Ended(1, 2.0)], [Ended(1, 2.0)])


def test_pickled_parts_outside_of_attributes_are_compared():
    rng = random.Random(1)
    before = independent_copy(rng)
    assert same(before, rng)
    rng.random()
    assert not same(before, rng)
