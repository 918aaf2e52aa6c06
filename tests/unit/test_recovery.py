"""The decision from where to go on, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.elastic.steps import Failure, Recovery, decide


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
        (Failure(steps=[3], in_reduction=True, amid=True), Recovery.COMMIT),
        (Failure(steps=[0], in_reduction=True, amid=True), Recovery.RESUME_POINT),
        (Failure(steps=[0], in_reduction=True, mid_update=True), Recovery.COMMIT),
        (Failure(steps=[], in_reduction=False), Recovery.COMMIT),
    ],
)
def test_live_tensors_are_used_only_at_a_step_boundary(failure, choice):
    decided, reason = decide(failure)
    assert decided is choice
    assert reason


@given(st.lists(st.integers(0, 5), max_size=3), st.booleans(), st.booleans())
def test_one_optimizer_loses_no_step_if_only_a_reduction_failed(steps, reduction, mid):
    decided, _ = decide(Failure(steps, reduction, mid))
    if len(steps) == 1 and reduction and not mid:
        assert decided is not Recovery.COMMIT
    if mid:
        assert decided is Recovery.COMMIT


@pytest.mark.parametrize(
    ("failure", "choice"),
    [
        (Failure(steps=[0], in_reduction=True, committed=True), Recovery.COMMIT),
        (Failure(steps=[0], in_reduction=True, altered=True), Recovery.COMMIT),
        (Failure(steps=[3], in_reduction=True, committed=True), Recovery.LIVE),
        (Failure(steps=[3], in_reduction=True, altered=True), Recovery.COMMIT),
    ],
)
def test_the_commit_is_used_right_after_it_and_when_tensors_were_altered(failure, choice):
    assert decide(failure)[0] is choice
