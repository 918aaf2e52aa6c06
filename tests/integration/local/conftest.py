"""Jobs on the local launcher, with a guard: after each test no process and no thread of ours is left."""

import gc
import os
import threading
import uuid

import pytest

from spark_elastic import LocalLauncher, run_async
from tests.integration.processes import MARK, assert_gone, marked


def fd_count():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def start_job():
    """run_async on a LocalLauncher with quick settings; checks the leftovers at the end."""
    mark = uuid.uuid4().hex
    before_threads = set(threading.enumerate())
    before_fds = fd_count()
    os.environ[MARK] = mark
    jobs = []

    def start(fn, args=(), *, hosts=("127.0.0.1",), preimport=(), launcher=None, **settings):
        settings = {
            "num_proc": 2,
            "start_timeout": 60,
            "elastic_timeout": 30,
            "heartbeat_timeout": 10,
            "cooldown_range": (0.05, 1.0),
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
    assert_gone(lambda: {pid: c for pid, c in marked(mark).items() if pid != os.getpid()}, 5.0)
    left = [thread.name for thread in set(threading.enumerate()) - before_threads if thread.is_alive()]
    assert left == []
    jobs.clear()
    gc.collect()
    assert fd_count() <= before_fds
