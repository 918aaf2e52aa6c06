"""`local[4]`: driver, executor and tasks share one JVM, so here it is workers and agents that die."""

import os
import signal
import time
from pathlib import Path

import pytest

from spark_elastic.errors import NotEnoughSlotsError
from tests.integration.clusters import local, module_fixture
from tests.integration.spark.conftest import finished

pytestmark = pytest.mark.cluster
cluster = module_fixture(local, 4)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_more_workers_than_there_can_ever_be_slots_are_refused_at_once(jobs):
    began = time.monotonic()
    with pytest.raises(NotEnoughSlotsError, match=r"8 slots are needed, and master local\[4\] has 4 slots"):
        jobs.start(len, ("four",), num_proc=8).result(60)
    assert time.monotonic() - began < 30


def test_a_job_that_can_do_with_the_slots_there_are_starts_with_them(jobs, capsys):
    assert jobs.start(len, ("four",), num_proc=8, min_num_proc=2, verbose=1).result(120) == [4] * 4
    said = capsys.readouterr().err
    assert "starting with 4 workers instead of num_proc=8: master local[4] has no more slots" in " ".join(said.split())
    assert "spark_elastic: status page: http://127.0.0.1:" in said


def test_workers_in_local_mode_are_forks_of_one_process_with_their_imports(jobs):
    def parent():
        return Path(f"/proc/{os.getppid()}/cmdline").read_text()

    assert all("spark_elastic.task.fork_server" in each for each in jobs.start(parent, num_proc=2).result(120))


def test_workers_die_at_every_stage_of_a_round(jobs):
    job, diary = jobs.train(3, training={"ballast": 2_000_000})
    diary.hold("initialised", 2)  # in the first world, before it has entered the loop
    kill(diary.held("initialised", 2))
    world = diary.wait_for_world(3)

    diary.hold("step", 1)  # the others are in the gradients' reduction and wait for it
    kill(diary.held("step", 1))
    world = diary.wait_for_world(3, after=world[0]["round"])

    diary.hold("rendezvous")
    kill(world[2]["pid"])
    second = diary.held("rendezvous")  # the others are connecting; one of them goes too
    diary.release("rendezvous")  # it hangs on until it sees that, or is dead before: both are fair
    kill(second)
    world = diary.wait_for_world(3, after=world[0]["round"])

    diary.hold("sync", 0)
    kill(world[2]["pid"])
    root = diary.held("sync", 0)  # the newcomer waits for the state that it is about to send
    assert root == world[0]["pid"]
    kill(root)
    world = diary.wait_for_world(3, after=world[0]["round"])

    diary.hold("sync", 2)
    kill(world[1]["pid"])
    newcomer = diary.held("sync", 2)
    assert newcomer not in [entry["pid"] for entry in world.values()]
    kill(newcomer)
    diary.wait_for_world(3, after=world[0]["round"])

    assert len(finished(job, diary)) == 3
