"""Calls that cannot work, and jobs that are called off: what is said, and that the session goes on working."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from spark_elastic import run
from spark_elastic.errors import ExecutorPythonError, JobCancelledError
from tests.integration.clusters import local, module_fixture
from tests.integration.local import loops
from tests.integration.processes import wait_until
from tests.integration.spark.conftest import active_jobs, nothing_imported_ahead
from tests.integration.spark.diary import WAIT_S

pytestmark = pytest.mark.cluster
cluster = module_fixture(local, 3)


def test_a_python_that_does_not_exist_is_named(jobs, monkeypatch):
    monkeypatch.setattr(jobs.cluster.sc, "pythonExec", "/no/such/python")
    with pytest.raises(ExecutorPythonError, match="/no/such/python"):
        jobs.start(abs, (-1,), num_proc=2, start_timeout=30)


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
    assert why in str(job.timeline()[-1])
    assert job.status().phase == "failed"


@pytest.mark.nightly
def test_a_job_can_be_cancelled_at_any_time(jobs):
    cancelled(jobs.start(abs, (-1,), num_proc=3), "at once")

    probing = jobs.start(abs, (-1,), num_proc=3)
    wait_until(lambda: active_jobs(jobs.cluster) or probing.done(), WAIT_S, "the probe runs")
    cancelled(probing, "while it looks for slots")

    busy, diary = jobs.train(2, max_num_proc=5)  # two slots stay pending
    diary.wait_for_world(3)
    waiting = jobs.start(abs, (-1,), num_proc=2)
    wait_until(lambda: waiting.status().phase, WAIT_S, "it waits")
    cancelled(waiting, "while it waits for slots")
    cancelled(busy, "while it trains and another one has waited for its slots")
    diary.check(busy)

    job, diary = jobs.train(2)
    diary.hold("init", "any")
    diary.held("init")
    cancelled(job, "while its workers start")
