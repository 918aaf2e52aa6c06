"""Ranks that make unequal steps: told which rank has left and which waits, and not tried again for ever."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.errors import UnequalStepsError
from tests.integration.local import unequal_steps

STALL_S = 3.0


@pytest.mark.parametrize(
    ("function", "steps", "left", "waiting", "step"),
    [
        pytest.param(unequal_steps.plain, {0: 4, 1: 5}, (0,), (1,), None, id="plain"),
        pytest.param(unequal_steps.in_loop, {0: 6, 1: 5, 2: 4}, (2,), (0, 1), 4, id="loop", marks=pytest.mark.soak),
    ],
)
def test_rank_that_leaves_early_twice_fails_the_job_by_name(
    start_job: Any, function: Any, steps: dict[int, int], left: Any, waiting: Any, step: int | None
) -> None:
    settings = {"num_proc": len(steps), "stall_timeout": STALL_S, "heartbeat_timeout": STALL_S}
    job = start_job(function, (steps,), preimport=("torch",), **settings)
    with pytest.raises(UnequalStepsError) as raised:
        job.result(60)
    assert (raised.value.left, raised.value.waiting, raised.value.step) == (left, waiting, step)
    assert sum("has left" in str(each) or "has returned" in str(each) for each in job.changes()) >= 1
