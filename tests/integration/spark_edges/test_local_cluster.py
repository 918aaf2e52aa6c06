"""The Spark edges on `local-cluster[2,2,1024]`, each executor with two (pretended) GPUs."""

import pytest

from spark_elastic.spark.session import cluster_of
from tests.integration.clusters import local_cluster
from tests.integration.spark_edges.fake_agent import probe

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
