"""The Spark edges on `local-cluster[2,2,1024]`, each executor with two (pretended) GPUs."""

from __future__ import annotations

import os

import pytest

from spark_elastic.spark.launcher import SparkLauncher
from spark_elastic.spark.session import cluster_of
from tests.integration.clusters import local_cluster
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent, probe, started

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    script = tmp_path_factory.mktemp("gpus") / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
    script.chmod(0o755)
    gpus = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
    }
    with local_cluster(2, 2, 1024, **gpus) as cluster:
        yield cluster


def test_gpus_limit_the_slots_where_they_are_scarcer_than_cores(cluster):
    count = cluster_of(cluster.sc).count_slots()
    assert (count.now, count.most) == (2, 2)
    assert count.where.startswith("2 executors with 2 slots")


def test_probe_places_one_task_on_each_executor_and_reports_its_gpu(cluster):
    reports = [report for report, _ in probe(cluster.sc, 2, 60.0).seen]
    assert {report.executor for report in reports} == set(cluster.executors())
    assert all(report.accelerators in {("0",), ("1",)} for report in reports)
    assert all(report.host in {a for of in report.addresses.values() for a in of} for report in reports)


def test_killed_executor_ends_its_slot_alone_and_the_slot_can_run_again(cluster, tmp_path):
    ends = Ends()
    launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: f"stay {tmp_path}".encode(), ends, description="test")
    try:
        launcher.launch(0)
        launcher.launch(1)
        pids = started(tmp_path, 2)
        below = {executor: set(cluster.python_processes(executor)) for executor in cluster.executors()}
        victim = next(executor for executor, processes in below.items() if pids[0] in processes)
        cluster.kill_executor(victim)
        [(slot, why, outcome, _)] = ends.wait_for(1)
        assert (slot, outcome) == (0, None)
        assert f"executor {victim} is lost" in why
        launcher.launch(0)  # while the other one stays on the only other executor: waits for a new JVM
        started(tmp_path, 3)
        assert len(ends.seen) == 1
        assert os.path.exists(f"/proc/{pids[1]}")
    finally:
        launcher.close(WAIT_S)


def test_slot_that_spark_would_retry_on_a_free_slot_ends_instead(cluster, tmp_path):
    ends = Ends()
    launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: b"exit 1", ends, description="test")
    try:
        launcher.launch(0)
        [(_, why, outcome, _)] = ends.wait_for(1)
        assert outcome is None
        assert "died" in why
    finally:
        launcher.close(WAIT_S)
