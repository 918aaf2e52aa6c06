"""The Spark edges on a standalone Master with Workers on 127.0.0.2, .3, …"""

from __future__ import annotations

import contextlib
import queue
from pathlib import Path

import psutil
import pytest

from spark_elastic.driver.spark.cluster import loss_of_executor
from spark_elastic.driver.spark.discovery import SparkHostDiscovery
from spark_elastic.driver.spark.executors import ExecutorAdded, ExecutorListener, ExecutorWatch
from spark_elastic.driver.spark.launcher import SparkLauncher
from spark_elastic.membership.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.task.spark_agent import slot_report
from tests.integration.clusters import standalone
from tests.integration.processes import wait_until
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent, started
from tests.leftovers import Before, nothing_left

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster():
    with standalone(workers=2, cores=1, decommission=True) as cluster:
        yield cluster


def test_probe_reports_the_addresses_that_the_workers_were_given(cluster):
    discovery = SparkHostDiscovery(cluster.sc, slot_report)
    probe = discovery.probe(2, 60.0)
    assert {report.host for report in probe.reports} == set(cluster.worker_hosts())
    assert {report.executor for report in probe.reports} == set(cluster.executors())
    assert discovery.find_available_hosts_and_slots() == dict.fromkeys(sorted(cluster.worker_hosts()), 1)


def test_listeners_come_and_go_without_a_trace_in_either_process(cluster):
    me, jvm = psutil.Process(), psutil.Process(cluster.driver_jvm)

    def dispatchers():
        """Threads of Spark's listener bus; Linux keeps the first 15 characters of their names."""
        found = 0
        for thread in jvm.threads():
            with contextlib.suppress(OSError):  # some other thread of the JVM that just ended
                found += Path(f"/proc/{jvm.pid}/task/{thread.id}/comm").read_text().startswith("spark-listener-")
        return found

    def cycle():
        listener = ExecutorListener(cluster.sc)
        assert listener.poll(0.01) is None
        listener.close()
        listener.close()

    cycle()
    listening, descriptors = dispatchers(), me.num_fds()
    with nothing_left():
        for _ in range(20):
            cycle()
    assert me.num_fds() < descriptors + 10  # Spark may open some of its own: fewer than one for each listener
    # a queue that was removed is stopped at once, and its thread has ended a moment later
    wait_until(lambda: dispatchers() <= listening, WAIT_S, "threads of the listener bus to end")


def test_killed_executor_is_reported_once_with_its_exit_code_and_its_successor_is_added(cluster):
    events = queue.Queue()
    watch, listener = ExecutorWatch(cluster.sc), ExecutorListener(cluster.sc)
    watch.start(events.put)
    try:
        victim = sorted(cluster.executors())[0]
        cluster.kill_executor(victim)
        assert events.get(timeout=WAIT_S) == ExecutorLost(victim, loss_of_executor("Command exited with code 137"))
        seen = [listener.poll(WAIT_S), listener.poll(WAIT_S)]
        (added,) = (event for event in seen if isinstance(event, ExecutorAdded))
        assert added.host in cluster.worker_hosts()
        assert added.cores == 1
        assert events.empty()
    finally:
        listener.close()
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
        discovery = SparkHostDiscovery(cluster.sc, slot_report)
        host = cluster.worker_hosts()[-1]
        cluster.decommission(host)
        event = events.get(timeout=WAIT_S)
        assert isinstance(event, ExecutorDecommissioned)
        assert ends.seen == []
        assert host not in discovery.find_available_hosts_and_slots()
        launcher.close(WAIT_S)
        assert events.get(timeout=WAIT_S).executor == event.executor  # gone after its task; said once each
    finally:
        launcher.close(WAIT_S)
        watch.close()
    before.assert_no_threads_left()
