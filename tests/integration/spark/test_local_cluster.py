"""`local-cluster[2,2,1024]`: two executors with two slots each, so that one JVM takes two workers with it."""

import pytest

from tests.integration.clusters import local_cluster, module_fixture
from tests.integration.processes import GONE_S, wait_until
from tests.integration.spark.conftest import executor_of, finished
from tests.integration.spark.diary import is_alive

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
cluster = module_fixture(local_cluster, 2, 2, 1024)


def test_an_executor_takes_its_two_workers_and_two_others_go_on(jobs, cluster):
    job, diary = jobs.train(4)
    world = diary.wait_for_world(4)
    assert len({executor_of(cluster, entry["pid"]) for entry in world.values()}) == 2

    executor = executor_of(cluster, world[0]["pid"])
    dead = [entry["pid"] for entry in world.values() if executor_of(cluster, entry["pid"]) == executor]
    assert len(dead) == 2
    survivor = next(rank for rank, entry in world.items() if entry["pid"] not in dead)
    diary.hold("step", survivor)
    diary.held("step", survivor)
    cluster.kill_executor(executor)
    wait_until(lambda: not any(map(is_alive, dead)), GONE_S, "its workers are gone")
    diary.release("step", survivor)
    world = diary.wait_for_world(4, after=world[0]["round"])
    assert not {entry["pid"] for entry in world.values()} & set(dead)

    assert len(finished(job, diary)) == 4
