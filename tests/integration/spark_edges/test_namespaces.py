"""The Spark edges with each Worker in a network namespace of its own."""

from __future__ import annotations

import queue

import pytest

from spark_elastic.driver.spark.discovery import SparkHostDiscovery
from spark_elastic.driver.spark.executors import ExecutorWatch
from spark_elastic.driver.spark.launcher import SparkLauncher
from spark_elastic.membership.events import ExecutorLost
from spark_elastic.task.spark_agent import slot_report
from tests.integration import network
from tests.integration.clusters import namespaced
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent, started
from tests.leftovers import Before

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(network.why_unavailable() is not None, reason=str(network.why_unavailable())),
]


@pytest.fixture(scope="module")
def cluster():
    with namespaced(workers=2, cores=1) as cluster:
        yield cluster


def test_each_slot_has_its_own_host_with_its_own_interface(cluster):
    probe = SparkHostDiscovery(cluster.sc, slot_report).probe(2, 60.0)
    assert {report.host for report in probe.reports} == set(cluster.worker_hosts())
    for report in probe.reports:
        assert {of[0] for of in report.addresses.values()} == {"127.0.0.1", report.host}


def test_silent_host_is_lost_after_sparks_own_timeout_and_close_does_not_wait_for_it(cluster, tmp_path):
    events: queue.Queue[object] = queue.Queue()
    ends, before = Ends(), Before()
    launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: f"stay {tmp_path}".encode(), ends, description="test")
    watch = ExecutorWatch(cluster.sc)
    watch.start(events.put)
    host = cluster.worker_hosts()[0]
    try:
        launcher.launch(0)
        launcher.launch(1)
        started(tmp_path, 2)
        cluster.link_down(host)
        event = events.get(timeout=WAIT_S)
        assert isinstance(event, ExecutorLost)
        assert "heartbeat" in event.cause.detail.lower() or "worker lost" in event.cause.detail.lower()
        [(_, why, outcome, _)] = ends.wait_for(1)
        assert outcome is None
        assert why
        launcher.close(5.0)
        assert [name for name in before.threads() if name.startswith("spark_elastic slot")] == []
    finally:
        cluster.link_up(host)
        launcher.close(5.0)
        watch.close()
