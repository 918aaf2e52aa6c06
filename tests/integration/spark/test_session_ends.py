"""The end of the session, or of the whole driver program, under a running job."""

import signal
import subprocess
import sys

import pytest

from spark_elastic import run
from spark_elastic.errors import JobError, NoSparkContextError
from tests.integration.clusters import ROOT, local
from tests.integration.local import loops
from tests.integration.processes import wait_until
from tests.integration.spark.conftest import Jobs, job_processes
from tests.integration.spark.diary import Diary, is_alive

pytestmark = pytest.mark.cluster


def test_stopping_the_session_ends_the_job_and_is_named_as_the_reason(tmp_path):
    with local(2) as cluster:
        job, diary = Jobs(cluster, tmp_path).train(2)
        diary.wait_for_world(2)
        session, context = cluster.spark, cluster.sc
        session.stop()
        with pytest.raises(JobError, match=r"SparkContext.* stopped|stopped.*SparkContext"):
            job.result(10)
        wait_until(lambda: not job_processes(cluster), 5, "its workers are gone")
        with pytest.raises(NoSparkContextError, match="was stopped"):
            run(loops.rank_and_size, num_proc=1, spark=context)
        with pytest.raises(NoSparkContextError, match="there is no active SparkContext"):
            run(loops.rank_and_size, num_proc=1)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_workers_are_gone_within_seconds_of_the_driver_program(tmp_path, name):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from spark_elastic import run
from tests.integration.clusters import local
from tests.integration.spark.training import train
with local(2) as cluster:
    run(train, ({str(tmp_path)!r},), num_proc=2, spark=cluster.spark)
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    world = Diary(tmp_path).wait_for_world(2)
    driver.send_signal(getattr(signal, name))
    driver.wait(20)
    for entry in world.values():
        wait_until(lambda pid=entry["pid"]: not is_alive(pid), 5, f"worker {entry['pid']} is gone")
        wait_until(lambda pid=entry["agent"]: not is_alive(pid), 5, f"agent {entry['agent']} is gone")
