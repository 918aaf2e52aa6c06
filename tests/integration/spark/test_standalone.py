"""A standalone Master with Workers: executors that are killed, that come late, and that announce their end."""

import os
import signal

import pytest

from spark_elastic.membership.timeline import WorkerLeft, WorldStarted
from tests.integration.clusters import module_fixture, standalone
from tests.integration.processes import GONE_S, wait_until
from tests.integration.spark.conftest import executor_of, finished
from tests.integration.spark.diary import WAIT_S, is_alive

pytestmark = pytest.mark.cluster
cluster = module_fixture(standalone, workers=2, cores=1, decommission=True)


def gone(entry):
    wait_until(lambda: not is_alive(entry["pid"]), GONE_S, f"worker {entry['pid']} is gone")


@pytest.mark.nightly
def test_executors_go_and_come_and_the_training_goes_on(jobs, cluster):
    job, diary = jobs.train(2, max_num_proc=3)
    world = diary.wait_for_world(2)
    for rank, how in ((1, signal.SIGTERM), (0, signal.SIGKILL)):
        os.kill(cluster.executors()[executor_of(cluster, world[rank]["pid"])], how)
        gone(world[rank])
        world = diary.wait_for_world(2, after=world[rank]["round"])
    lost = [change.reason for change in job.changes() if change.kind == "lost"]
    assert lost[0] == "killed by signal 15", "and not as the worker that Spark's daemon has killed"

    cluster.add_worker()
    world = diary.wait_for_world(3, after=world[0]["round"])

    leaver = world[2]
    host = host_of(job, leaver)
    cluster.decommission(host)
    gone(leaver)
    world = diary.wait_for_world(2, after=world[0]["round"])
    left = [record for record in job.timeline() if isinstance(record, WorkerLeft)][-1]
    assert left.graceful
    assert left.place.host == host
    before, after = [r for r in job.timeline() if isinstance(r, WorldStarted)][-2:]
    done = [e for e in diary.read() if e["what"] == "applied" and e["round"] == before.round]
    assert max(entry["step"] for entry in done) == after.progress

    assert len(finished(job, diary)) == 2


def host_of(job, entry):
    """The host of a worker, found by the driver's account of who was where."""
    return next(
        member.place.host
        for member in job._driver._peers.world.members
        if job._driver._peers.world.round == entry["round"] and member.rank == entry["rank"]
    )


def test_a_killed_worker_daemon_takes_its_executor_along(jobs, cluster):
    job, diary = jobs.train(2)
    world = diary.wait_for_world(2)
    victim = world[0]
    cluster.kill_worker(host_of(job, victim))
    wait_until(lambda: not is_alive(victim["pid"]), WAIT_S, "its executor has noticed")
    diary.wait_for_world(1, after=victim["round"])
    assert len(finished(job, diary)) == 1
