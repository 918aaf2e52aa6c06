"""The end of the session, or of the whole driver program, under a running job."""

import os
import signal
import subprocess
import sys

import pytest

from spark_elastic import run
from spark_elastic.errors import NoSparkContextError, SessionLostError
from tests.integration.clusters import ROOT, local
from tests.integration.local import loops
from tests.integration.processes import GONE_S, wait_until
from tests.integration.spark.conftest import Jobs, job_processes
from tests.integration.spark.diary import Diary, is_alive

pytestmark = pytest.mark.cluster


def test_stopping_the_session_ends_the_job_and_is_named_as_the_reason(tmp_path):
    with local(2) as cluster:
        job, diary = Jobs(cluster, tmp_path).train(2)
        diary.wait_for_world(2)
        session, context = cluster.spark, cluster.sc
        session.stop()
        with pytest.raises(SessionLostError, match="the SparkContext was stopped while the job ran"):
            job.result(60)
        assert "SparkContext was stopped" in str(job.timeline()[-1])
        wait_until(lambda: not job_processes(cluster), GONE_S, "its workers are gone")
        with pytest.raises(NoSparkContextError, match="was stopped"):
            run(loops.rank_and_size, num_proc=1, spark=context)
        with pytest.raises(NoSparkContextError, match="there is no active SparkContext"):
            run(loops.rank_and_size, num_proc=1)


PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from spark_elastic import run
from tests.integration.clusters import local
from tests.integration.spark.training import train
with local(2) as cluster:
    print(cluster.driver_jvm, flush=True)
    try:
        run(train, (sys.argv[1],), num_proc=2, spark=cluster.spark)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        os._exit(3)
"""


@pytest.fixture
def program(tmp_path):
    """A driver program that trains, the pid of its JVM, and its workers' last steps."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        jvm = int(process.stdout.readline())
        yield process, jvm, Diary(tmp_path).wait_for_world(2)
        process.kill()


def assert_all_gone(world):
    for entry in world.values():
        for kind in ("pid", "agent"):
            wait_until(lambda pid=entry[kind]: not is_alive(pid), GONE_S, f"{kind} {entry[kind]} is gone")


@pytest.mark.nightly
def test_workers_are_gone_within_seconds_of_the_driver_program(program):
    process, _, world = program
    process.kill()  # SIGTERM: tests/integration/local/test_jobs.py
    process.wait(60)
    assert_all_gone(world)


@pytest.mark.nightly
def test_a_job_ends_with_spark_s_jvm_and_names_it(program):
    process, jvm, world = program
    os.kill(jvm, signal.SIGKILL)
    said = process.stdout.readline()
    assert said.startswith("SessionLostError the connection to Spark's JVM is gone while the job ran"), said
    assert process.wait(60) == 3
    assert_all_gone(world)
