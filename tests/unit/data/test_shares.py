"""The shares that a `Balancer` decides on: from the times of steps whose speeds are scheduled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.order.shares import Balancer, equal_shares, most_rows, part_of

SLOW_AT, FAST_AT, END = 30, 80, 130


def trained(balancer, rows, slowness, steps, noise=0.0, seed=0):
    """Return the rows of each rank at each step; `slowness(step)` are the seconds of a row on each rank.

    As in a training, the times of a step arrive with the reduction of the next one.
    """
    chance = random.Random(seed)
    taken, times = [], None
    for step in range(steps):
        shares = balancer.shares or equal_shares(rows, len(slowness(step)))
        taken.append(list(shares))
        if times is not None:
            balancer.observe(times)
        times = [
            count * each * chance.uniform(1 - noise, 1 + noise)
            for count, each in zip(shares, slowness(step), strict=True)
        ]
    return taken


def half_speed(step):
    return [1.0, 1.0, 1.0, 2.0 if SLOW_AT <= step < FAST_AT else 1.0]


@pytest.mark.parametrize("rows", [64, 128, 1000])
def test_half_speed_of_one_in_four_leaves_83_percent_within_20_steps_and_all_comes_back(rows):
    taken = trained(Balancer(4, rows), rows, half_speed, END)
    equal = equal_shares(rows, 4)
    assert taken[:SLOW_AT] == [equal] * SLOW_AT
    for shares in taken[SLOW_AT + 20 : FAST_AT]:
        longest = max(count * each for count, each in zip(shares, half_speed(SLOW_AT), strict=True))
        assert rows / 4 / longest >= 0.83
    assert taken[FAST_AT + 20 :] == [equal] * (END - FAST_AT - 20)
    assert len({share for shares in taken for share in shares}) <= 6, "each size may have to be compiled"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_noise_of_20_percent_leaves_shares_equal(size):
    taken = trained(Balancer(size, 16 * size), 16 * size, lambda step: [1.0] * size, 5000, noise=0.2, seed=size)
    assert all(shares == [16] * size for shares in taken)


def test_a_few_long_steps_such_as_those_that_compile_change_nothing():
    slowness = lambda step: [1.0, 100.0 if step % 10 == 5 else 1.0]  # noqa: E731
    taken = trained(Balancer(2, 32), 32, slowness, 100)
    assert taken[-1] == [16, 16]
    assert sum(shares != [16, 16] for shares in taken) == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.integers(1, 9), least=st.integers(1, 4))
def test_shares_sum_to_the_batch_and_are_the_same_for_all(data, size, least):
    rows = data.draw(st.integers(1, 300))
    slowness = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=size, max_size=size))
    balancers = [Balancer(size, rows, least) for _ in range(2)]
    for balancer in balancers:
        for _ in range(12):
            balancer.observe(slowness)
    assert balancers[0].shares == balancers[1].shares
    shares = balancers[0].shares or equal_shares(rows, size)
    assert sum(shares) == rows
    assert min(shares) >= min(least, rows // size)
    edges = [part_of(rank, size, balancers[0].shares) for rank in range(size)]
    assert edges[0][0] == 0
    assert edges[-1][1] == edges[-1][2]
    assert most_rows(rows, size, balancers[0].shares) == max(shares)


def test_a_rank_takes_no_more_than_it_has_memory_for():
    balancer = Balancer(3, 30)
    for _ in range(6):
        balancer.observe([30.0, 10.0, 10.0], [0, 0, 11])
    assert balancer.shares == [5, 14, 11]


@pytest.mark.parametrize("unknown", [[1.0, 0.0], [1.0, float("inf")], [1.0, float("nan")], []])
def test_steps_whose_times_are_unknown_do_not_count(unknown):
    balancer = Balancer(2, 32)
    for _ in range(50):
        assert balancer.observe(unknown) is None


def test_a_change_says_who_is_slow_and_what_was_done():
    balancer = Balancer(2, 30)
    changes = [balancer.observe([10.0, 20.0]) for _ in range(6)]
    assert str(changes[-1]) == (
        "rank 1 works 2.0 times as long for a row as the others: it takes 33 % of each batch now, "
        "and the largest share is 67 %"
    )
