"""Jobs on the local launcher, with a guard: after each test no process and no thread of ours is left."""

import os

import pytest

from spark_elastic import LocalLauncher, run_async
from tests.integration.processes import GONE_S, KEPT, MARK, OF_THIS_PROCESS, assert_gone, left_by_jobs
from tests.leftovers import Before


@pytest.fixture
def start_job():
    """run_async on a LocalLauncher with quick settings; checks the leftovers at the end."""
    before = Before()
    os.environ[MARK] = OF_THIS_PROCESS
    jobs = []

    def start(fn, args=(), *, hosts=("127.0.0.1",), preimport=(), launcher=None, **settings):
        settings = {
            "num_proc": 2,
            "start_timeout": 60,
            "elastic_timeout": 30,
            "heartbeat_timeout": 10,
            "cooldown_range": (0.05, 1.0),
            **(KEPT if preimport else {}),
            **settings,
        }
        launcher = launcher or LocalLauncher(hosts=hosts, preimport=preimport)
        job = run_async(fn, args, launcher=launcher, **settings)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.cancel("the test is over")
    del os.environ[MARK]
    assert_gone(left_by_jobs, GONE_S)
    jobs.clear()
    before.assert_nothing_left()
