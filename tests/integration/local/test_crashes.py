"""A crash that comes back at the same step ends the job with what is known of it."""

import os
import signal
import sys

import pytest

from spark_elastic.errors import RepeatedCrashError, ResetLimitError
from tests.integration.local import loops

STEP = 5


def crash_at(rank, step):
    import ctypes

    if step == STEP and rank == 0:
        print("about to read row 4711", file=sys.stderr, flush=True)
        ctypes.string_at(0)


def kill_at(rank, step):
    if step == STEP and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_step_that_crashes_everybody_who_tries_it_is_named_with_the_signal_and_stderr(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 20, crash_at), num_proc=3, min_num_proc=1)
    with pytest.raises(RepeatedCrashError, match=r"at step 6.* rank 0 on 127.0.0.1 was killed by signal 11") as caught:
        job.result(60)
    assert caught.value.step == STEP + 1
    assert {code for _, _, code in caught.value.crashes} == {-signal.SIGSEGV}
    assert "about to read row 4711" in str(caught.value)


@pytest.mark.nightly
def test_a_process_that_is_killed_at_one_step_each_time_is_not_started_for_ever(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 20, kill_at), num_proc=2)
    with pytest.raises(RepeatedCrashError, match=r"the last \d worlds .*killed by signal 9 \(SIGKILL\)") as caught:
        job.result(90)
    # SIGKILL counts once it is known that the agent was not killed as well: the next world may die before that.
    assert len(caught.value.crashes) in (3, 4)
    assert job.status().progress == STEP


@pytest.mark.nightly
def test_without_a_limit_it_is_tried_on(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 20, kill_at), num_proc=2, crash_limit=None, reset_limit=5)
    with pytest.raises(ResetLimitError, match="reset_limit is 5"):
        job.result(90)
