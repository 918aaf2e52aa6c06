"""Executors and workers that go and come in the middle of `model.fit`, on a standalone cluster."""

import os
import signal

import pytest

from spark_elastic.membership.timeline import WorkerLeft, WorldStarted
from tests.integration.clusters import standalone
from tests.integration.spark.conftest import executor_of, finished
from tests.integration.spark.keras_training import train
from tests.integration.spark.test_standalone import gone, host_of

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.soak]


@pytest.fixture(scope="module")
def cluster():
    with standalone(workers=2, cores=1, decommission=True) as running:
        yield running


def test_fit_goes_on_whoever_goes_and_comes(jobs, cluster):
    job, diary = jobs.train(2, max_num_proc=3, function=train)
    world = diary.wait_for_world(2)

    diary.hold("step", 1)  # rank 0 is in the gradients' reduction, inside of the step's graph, and waits for it
    os.kill(diary.held("step", 1), signal.SIGKILL)
    world = diary.wait_for_world(2, after=world[1]["round"])

    cluster.kill_executor(executor_of(cluster, world[0]["pid"]))
    gone(world[0])
    world = diary.wait_for_world(2, after=world[0]["round"])

    cluster.add_worker()
    world = diary.wait_for_world(3, after=world[0]["round"])

    leaver = world[2]
    cluster.decommission(host_of(job, leaver))
    gone(leaver)
    diary.wait_for_world(2, after=world[0]["round"])
    left = [record for record in job.events() if isinstance(record, WorkerLeft)][-1]
    assert left.graceful
    before, after = [record for record in job.events() if isinstance(record, WorldStarted)][-2:]
    done = [entry for entry in diary.read() if entry["what"] == "applied" and entry["round"] == before.round]
    assert max(entry["step"] for entry in done) == after.progress  # no step is redone

    assert len(finished(job, diary)) == 2
    epochs = [entry for entry in diary.read() if entry["what"] == "epoch"]
    assert all(entry["number"] == entry["known"] for entry in epochs)  # newcomers too count from the first epoch on
    for rank in (0, 1):
        numbers = [entry["number"] for entry in epochs if entry["rank"] == rank]
        assert numbers == sorted(set(numbers))
