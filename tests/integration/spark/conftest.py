"""Jobs on real clusters, with a guard: after each test nothing of ours is left, on any side."""

import contextlib
import weakref

import pytest

from spark_elastic import run_async
from spark_elastic.jobs import start
from tests.integration.processes import GONE_S, KEPT, assert_gone, wait_until, without_servers
from tests.integration.spark.diary import Diary
from tests.integration.spark.training import train
from tests.leftovers import Before


def job_processes(cluster):
    """Pid → command line of the workers and what they forked."""
    return {pid: command for pid, command in cluster.processes().items() if "spark_elastic.task" in command}


def active_tasks(cluster):
    """Tasks that Spark's executors run at this moment."""
    executors = cluster.sc._jsc.sc().statusStore().executorList(True)
    return sum(executors.apply(index).activeTasks() for index in range(executors.size()))


def active_jobs(cluster):
    return list(cluster.sc.statusTracker().getActiveJobsIds())


def executor_of(cluster, pid):
    """The id of the executor that a process stands below."""
    return next(executor for executor in cluster.executors() if pid in cluster.python_processes(executor))


@contextlib.contextmanager
def nothing_imported_ahead():
    """Workers of jobs that are started meanwhile import nothing before they are asked to. Otherwise that is torch,
    which takes seconds of the processor in each worker, and functions that are no training need none of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "modules_of", lambda function: ())
        yield


class Jobs:
    """Starts jobs on a cluster with quick settings, each training with a diary of its own."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self._folder = folder
        self._jobs = weakref.WeakSet()
        self.count = 0

    def start(self, fn, args=(), *, is_training=False, **settings):
        settings = {
            "spark": self.cluster.spark if self.cluster is not None else None,
            "start_timeout": 120,
            "elastic_timeout": 90,
            "heartbeat_timeout": 20,
            "cooldown_range": (0.05, 1.0),
            # in local mode, where all workers are one executor's, one process imports torch for them
            **(KEPT if is_training and self.cluster.kind == "local" else {}),
            **settings,
        }
        with contextlib.nullcontext() if is_training else nothing_imported_ahead():
            job = run_async(fn, args, **settings)
        self._jobs.add(job)
        return job

    def train(self, num_proc, min_num_proc=1, *, function=train, training=None, **settings):
        """A `training.train`, or another one that writes such a diary. Returns: the job and its diary."""
        self.count += 1
        folder = self._folder / f"job-{self.count}"
        folder.mkdir()
        arguments = (str(folder), *(training or {}).values())
        assert list(training or {}) == list(function.__annotations__)[1 : 1 + len(training or {})]
        settings = {"num_proc": num_proc, "min_num_proc": min_num_proc, **settings}
        job = self.start(function, arguments, is_training=True, **settings)
        return job, Diary(folder)

    def end(self):
        for job in list(self._jobs):
            job.cancel("the test is over")


def finished(job, diary, timeout=120):
    """Have the training end, and check all of it. Returns: the results."""
    diary.finish()
    results = job.result(timeout)
    diary.check(job, results)
    return results


@pytest.fixture
def jobs(cluster, tmp_path):
    """`Jobs` on the module's cluster; checks at the end that nothing is left."""
    before = Before()
    started = Jobs(cluster, tmp_path)
    yield started
    started.end()
    assert_nothing_left(cluster, before)


def assert_nothing_left(cluster, before):
    assert_gone(lambda: without_servers(job_processes(cluster)), GONE_S)
    wait_until(lambda: not active_jobs(cluster), GONE_S, "no Spark job runs")
    wait_until(lambda: not active_tasks(cluster), GONE_S, "no task of ours runs")
    before.assert_no_threads_left()
