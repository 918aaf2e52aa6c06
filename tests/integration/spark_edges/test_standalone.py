"""The Spark edges on a standalone Master with Workers on 127.0.0.2, .3, …"""

from __future__ import annotations

import queue

import pytest

from spark_elastic.membership.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.spark.executors import ExecutorWatch
from spark_elastic.spark.failures import loss_of_executor
from spark_elastic.spark.launcher import SparkLauncher
from tests.integration.clusters import standalone
from tests.integration.processes import wait_until
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent, probe, started
from tests.leftovers import Before

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster():
    with standalone(workers=2, cores=1, decommission=True) as cluster:
        yield cluster


def test_probe_reports_the_addresses_that_the_workers_were_given(cluster):
    reports = [report for report, _ in probe(cluster.sc, 2, 60.0).seen]
    assert {report.host for report in reports} == set(cluster.worker_hosts())
    assert {report.executor for report in reports} == set(cluster.executors())


def test_killed_executor_is_reported_once_with_its_exit_code_and_its_successor_is_watched(cluster):
    events = queue.Queue()
    watch = ExecutorWatch(cluster.sc)
    watch.start(events.put)
    try:
        victim = sorted(cluster.executors())[0]
        cluster.kill_executor(victim)
        assert events.get(timeout=WAIT_S) == ExecutorLost(victim, loss_of_executor("Command exited with code 137"))
        wait_until(lambda: len(watch._known) == 2, WAIT_S, "its successor is added")
        assert victim not in watch._known
        assert events.empty()
    finally:
        watch.close()


def test_decommissioned_executor_is_announced_while_its_agent_still_runs(cluster, tmp_path):
    events, before = queue.Queue(), Before()
    ends = Ends()
    launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: f"stay {tmp_path}".encode(), ends, description="test")
    watch = ExecutorWatch(cluster.sc)
    watch.start(events.put)
    try:
        for slot in range(2):
            launcher.launch(slot)
        started(tmp_path, 2)
        host = cluster.worker_hosts()[-1]
        cluster.decommission(host)
        event = events.get(timeout=WAIT_S)
        assert isinstance(event, ExecutorDecommissioned)
        assert ends.seen == []
        launcher.close(WAIT_S)
        assert events.get(timeout=WAIT_S).executor == event.executor  # gone after its task; said once each
    finally:
        launcher.close(WAIT_S)
        watch.close()
    before.assert_no_threads_left()
