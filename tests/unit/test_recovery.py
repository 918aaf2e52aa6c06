"""The decision from where to go on, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.core.recovery import Failure, Recovery, decide, records_to_keep


@pytest.mark.parametrize(
    ("failure", "choice"),
    [
        (Failure(steps=[0], in_reduction=True), Recovery.RESUME_POINT),
        (Failure(steps=[0], in_reduction=False), Recovery.RESUME_POINT),
        (Failure(steps=[0, 0], in_reduction=False), Recovery.RESUME_POINT),
        (Failure(steps=[3], in_reduction=True), Recovery.LIVE),
        (Failure(steps=[3, 3], in_reduction=True), Recovery.LIVE),
        (Failure(steps=[3, 2], in_reduction=True), Recovery.COMMIT),
        (Failure(steps=[3], in_reduction=False), Recovery.COMMIT),
        (Failure(steps=[0], in_reduction=True, mid_update=True), Recovery.COMMIT),
        (Failure(steps=[], in_reduction=False), Recovery.COMMIT),
    ],
)
def test_the_live_tensors_are_used_only_where_they_stand_at_a_boundary(failure, choice):
    decided, reason = decide(failure)
    assert decided is choice
    assert reason


@given(st.lists(st.integers(0, 5), max_size=3), st.booleans(), st.booleans())
def test_nothing_applied_is_ever_given_up_if_only_the_reduction_failed_with_one_optimizer(steps, reduction, mid):
    decided, _ = decide(Failure(steps, reduction, mid))
    if len(steps) == 1 and reduction and not mid:
        assert decided is not Recovery.COMMIT
    if mid:
        assert decided is Recovery.COMMIT


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_records_of_the_step_that_is_done_again_are_taken_back_wherever_the_loop_records(passes, steps):
    before_step = passes * (steps + 1)  # recorded before the optimizer's step
    after_step = passes * steps + passes - 1  # recorded after it: the last pass's record is still to come
    assert records_to_keep(before_step, steps, passes) == passes * steps
    assert records_to_keep(after_step, steps, passes) == passes * steps


def test_records_that_do_not_follow_the_steps_are_left_alone():
    assert records_to_keep(0, 9) == 0
    assert records_to_keep(50, 9) == 50
