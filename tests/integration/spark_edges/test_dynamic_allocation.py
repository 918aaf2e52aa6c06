"""The Spark edges where Spark itself adds and removes executors."""

import pytest

import spark_elastic
from spark_elastic.errors import NotEnoughSlotsError
from spark_elastic.spark.discovery import SlotWait, wait_for_slots
from spark_elastic.spark.launcher import SparkLauncher
from spark_elastic.spark.session import cluster_of
from tests.integration.clusters import Standalone
from tests.integration.spark_edges.fake_agent import Ends, fake_agent, probe, started

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]

SETTINGS = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
}


@pytest.fixture(scope="module")
def cluster():
    with Standalone(2, 1, SETTINGS, wait_for=0) as cluster:
        yield cluster


def test_what_may_come_is_counted_apart_from_what_is_there(cluster):
    count = cluster_of(cluster.sc).count_slots()
    assert count.most == 2
    assert count.now <= 2
    assert cluster_of(cluster.sc).worker_bounds() == (1, 2)


def test_barrier_mode_is_refused_and_the_probe_says_so(cluster):
    found = probe(cluster.sc, 2, 10.0)
    assert found.seen == ()
    assert "dynamic allocation" in found.why


def test_more_slots_than_dynamic_allocation_may_bring_are_refused_at_once(cluster):
    with pytest.raises(NotEnoughSlotsError, match="maxExecutors allows no more"):
        wait_for_slots(cluster_of(cluster.sc), 3, 600.0, SlotWait())


def test_job_without_num_proc_gets_the_executors_of_its_profile(cluster):
    def cores():
        import os

        return os.environ["OMP_NUM_THREADS"]

    assert set(spark_elastic.run(cores, spark=cluster.sc, verbose=0, resources={"cpus": 1})) == {"1"}


def test_pending_slots_are_the_demand_that_brings_executors(cluster, tmp_path):
    launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: f"stay {tmp_path}".encode(), Ends(), description="t")
    try:
        launcher.launch(0)
        launcher.launch(1)
        started(tmp_path, 2, 60.0)
        assert len(cluster.executors()) == 2
    finally:
        launcher.close(5.0)
