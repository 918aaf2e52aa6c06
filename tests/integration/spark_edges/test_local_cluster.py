"""The Spark edges on `local-cluster[2,2,1024]`, each executor with two (pretended) GPUs."""

import pytest

import spark_elastic
from spark_elastic.errors import InvalidSettingsError, NotEnoughSlotsError
from spark_elastic.spark import discovery
from spark_elastic.spark.discovery import SlotWait
from spark_elastic.spark.executor_process import look_at_slot
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
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "2",
    }
    with local_cluster(2, 2, 1024, **gpus) as cluster:
        yield cluster


def test_gpus_limit_the_slots_where_they_are_scarcer_than_cores(cluster):
    count = cluster_of(cluster.sc).count_slots()
    assert (count.now, count.most) == (2, 2)
    assert count.where.startswith("2 executors with 2 slots")


def test_probe_places_one_task_on_each_executor_and_reports_its_gpus(cluster):
    reports = [report for report, _ in probe(cluster.sc, 2, 60.0).seen]
    assert {report.executor for report in reports} == set(cluster.executors())
    assert all(report.accelerators == ("0", "1") for report in reports)
    assert all(report.host in {a for of in report.addresses.values() for a in of} for report in reports)


def test_task_with_two_gpus_becomes_two_workers_with_one_each(cluster):
    each = cluster_of(cluster.sc)
    each.take_resources({"cpus": 2}, gpu_each=True)
    each.take_resources(None, gpu_each=True)
    assert each.resources == {"gpu": 1, "cpus": 1}
    assert each.count_slots().now == each.fixed_slots() == each.slots_free() == 4
    seen = [report for report, _ in discovery.probe(each, look_at_slot, 4, 60.0, SlotWait()).seen]
    places = {(report.executor, gpu) for report in seen for gpu in report.accelerators}
    assert places == {(executor, gpu) for executor in cluster.executors() for gpu in "01"}

    def seen_by_worker():
        import os

        return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"]

    given = {"num_proc": 2, "spark": cluster.sc, "verbose": 0}
    assert spark_elastic.run(seen_by_worker, **given, device="cpu") == [("", "1")] * 2  # one task of the session each
    assert sorted(spark_elastic.run(seen_by_worker, **given)) in ([("0", "1")] * 2, [("0", "1"), ("1", "1")])
    wide = spark_elastic.run(seen_by_worker, **given, resources={"gpu": 1, "cpus": 2})
    assert wide == [("0", "2")] * 2  # an executor has two cores, so there is one on each
    with pytest.raises(InvalidSettingsError, match=r"resources=\{'fpga': 1\}: .*fpga"):
        spark_elastic.run(seen_by_worker, **given, resources={"fpga": 1})
    with pytest.raises(NotEnoughSlotsError, match="has 0 slots and can never have more"):
        spark_elastic.run(seen_by_worker, **given, resources={"cpus": 3})
