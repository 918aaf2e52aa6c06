"""Calls that cannot work, and jobs that are called off: what is said, and that the session goes on working."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from spark_elastic import run
from spark_elastic.errors import (
    ExecutorPythonError,
    JobCancelledError,
    NotEnoughSlotsError,
    ResultError,
)
from tests.integration.clusters import local
from tests.integration.local import loops
from tests.integration.processes import wait_until
from tests.integration.spark.conftest import active_jobs, finished, nothing_imported_ahead
from tests.integration.spark.diary import WAIT_S

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with local(3, spark_driver_maxResultSize="8m") as running:
        yield running


def test_too_few_slots_are_told_with_the_numbers(jobs):
    job = jobs.start(abs, (-1,), num_proc=7)
    with pytest.raises(
        NotEnoughSlotsError, match=r"7 slots are needed, and master local\[3\] has 3 slots and can never"
    ):
        job.result(30)


def test_slots_that_exist_but_are_busy_are_told_apart(jobs):
    busy, diary = jobs.train(3)
    diary.wait_for_world(3)
    job = jobs.start(abs, (-1,), num_proc=2, start_timeout=2.0)
    with pytest.raises(NotEnoughSlotsError, match="never 2 free at the same time"):
        job.result(60)
    assert len(finished(busy, diary)) == 3


def test_a_python_that_does_not_exist_is_named(jobs, monkeypatch):
    monkeypatch.setattr(jobs.cluster.sc, "pythonExec", "/no/such/python")
    with pytest.raises(ExecutorPythonError, match="/no/such/python"):
        jobs.start(abs, (-1,), num_proc=2, start_timeout=30)


def test_a_result_that_spark_will_not_carry_is_an_error_that_names_its_setting(jobs):
    def big():
        rank, _ = loops.rank_and_size()
        return os.urandom(20_000_000 if rank == 1 else 10)

    job = jobs.start(big, num_proc=2)
    with pytest.raises(ResultError, match=r"spark\.driver\.maxResultSize"):
        job.result(120)


def test_jobs_one_after_the_other_from_this_thread_and_from_another(jobs):
    settings = {"num_proc": 2, "spark": jobs.cluster.spark, "verbose": 0}
    expected = [(0, 2), (1, 2)]
    with nothing_imported_ahead():
        assert run(loops.rank_and_size, **settings) == expected
        assert run(loops.rank_and_size, **settings) == expected
        results = []
        thread = threading.Thread(target=lambda: results.append(run(loops.rank_and_size, **settings)))
        thread.start()
        thread.join(WAIT_S)
    assert results == [expected]


def test_an_interrupt_ends_the_job_and_the_next_one_works(jobs, tmp_path):
    def interrupt_when_it_trains():
        wait_until(Path(tmp_path, "step-3").exists, WAIT_S, "a third step")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_it_trains)
    thread.start()
    settings = {"num_proc": 2, "spark": jobs.cluster.spark}
    with nothing_imported_ahead():
        with pytest.raises(KeyboardInterrupt):
            run(loops.steps, (str(tmp_path), 10**6), min_num_proc=1, **settings)
        thread.join()
        assert run(loops.rank_and_size, **settings) == [(0, 2), (1, 2)]


def cancelled(job, why):
    job.cancel(why)
    assert job.done()
    with pytest.raises(JobCancelledError, match=re.escape(why)):
        job.result(0)
    assert why in str(job.events()[-1])
    assert job.status().phase == "failed"


def test_a_job_can_be_cancelled_at_any_time(jobs):
    cancelled(jobs.start(abs, (-1,), num_proc=3), "at once")

    probing = jobs.start(abs, (-1,), num_proc=3)
    wait_until(lambda: active_jobs(jobs.cluster) or probing.done(), WAIT_S, "the probe runs")
    cancelled(probing, "while it looks for slots")

    busy, diary = jobs.train(3)
    diary.wait_for_world(3)
    waiting = jobs.start(abs, (-1,), num_proc=2)
    wait_until(lambda: waiting.status().phase, WAIT_S, "it waits")
    cancelled(waiting, "while it waits for slots")
    cancelled(busy, "while another one has waited for its slots")

    job, diary = jobs.train(3, max_num_proc=5)  # two slots stay pending
    diary.hold("init", "any")
    diary.held("init")
    cancelled(job, "while its workers start")

    job, diary = jobs.train(2, max_num_proc=5)
    diary.wait_for_world(3)
    cancelled(job, "while it trains")
    diary.check(job)
