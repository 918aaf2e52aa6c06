"""`local[4]`: driver, executor and tasks share one JVM, so here it is workers and agents that die."""

import os
import signal

import pytest

from spark_elastic.core.timeline import WorldStarted
from spark_elastic.errors import StateLostError
from tests.integration.clusters import local
from tests.integration.processes import wait_until
from tests.integration.spark.conftest import finished
from tests.integration.spark.diary import WAIT_S, is_alive

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with local(4) as running:
        yield running


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def worlds(job):
    return [record for record in job.events() if isinstance(record, WorldStarted)]


def test_results_come_by_rank_from_as_many_workers_as_there_are_slots(jobs):
    def place():
        import spark_elastic.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()

    assert jobs.start(place).result(120) == [(rank, 4, rank, 4, 1) for rank in range(4)]


def test_a_training_outlives_every_one_of_its_processes(jobs):
    job, diary = jobs.train(3)
    world = diary.wait_for_world(3)

    kill(world[1]["pid"])  # a worker
    world = diary.wait_for_world(3, after=world[1]["round"])

    kill(world[0]["pid"])  # rank 0
    world = diary.wait_for_world(3, after=world[0]["round"])

    kill(world[2]["agent"])  # the Python process of a Spark task; its worker goes with it
    wait_until(lambda: not is_alive(world[2]["pid"]), 5, "the agent's worker is gone")
    world = diary.wait_for_world(3, after=world[2]["round"])

    for rank in (0, 1):  # all but one
        kill(world[rank]["pid"])
    survivor = world[2]["pid"]
    world = diary.wait_for_world(3, after=world[2]["round"])
    assert world[0]["pid"] == survivor

    assert len(finished(job, diary)) == 3
