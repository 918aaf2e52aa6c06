"""Slots as jobs of one thread, on `local[4]`: threads, cancellation by others, large results."""

import pytest

from spark_elastic.spark.launcher import SparkLauncher
from tests.integration.clusters import local, module_fixture
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent, started

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]
cluster = module_fixture(local, 4)


def launcher_of(cluster, payload, description="test"):
    ends = Ends()
    return SparkLauncher(cluster.sc, fake_agent, lambda slot: payload.encode(), ends, description=description), ends


def active_jobs(cluster):
    return cluster.sc.statusTracker().getActiveJobsIds()


def test_large_result_comes_whole(cluster):
    launcher, ends = launcher_of(cluster, "big 40000000")
    launcher.launch(0)
    [(_, why, outcome, _)] = ends.wait_for(1)
    assert why == "done"
    assert outcome.result == bytes(40_000_000)
    launcher.close(WAIT_S)


@pytest.mark.parametrize("how", ["all", "job", "group"])
def test_slots_that_the_user_cancels_end_with_that_reason(cluster, tmp_path, how):
    launcher, ends = launcher_of(cluster, f"stay {tmp_path}")
    launcher.launch(0)
    launcher.launch(1)
    started(tmp_path, 2)
    store = cluster.sc._jsc.sc().statusStore()
    for job in active_jobs(cluster):
        if how == "job":
            cluster.sc._jsc.sc().cancelJob(job)
        elif how == "group":
            cluster.sc.cancelJobGroup(store.job(job).jobGroup().get())
    if how == "all":
        cluster.sc.cancelAllJobs()
    assert all("job was cancelled" in why for _, why, _, _ in ends.wait_for(2))
    launcher.close(WAIT_S)
