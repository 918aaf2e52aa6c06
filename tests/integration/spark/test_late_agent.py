"""Spark runs the task of a cancelled job on, for seconds. Here, for as long as a test wants."""

import functools

import pytest

from spark_elastic.membership.timeline import PlaceCooledDown, WorkerLeft
from spark_elastic.task import spark_agent
from tests.integration.clusters import local
from tests.integration.processes import wait_until
from tests.integration.spark.conftest import active_jobs, finished
from tests.integration.spark.diary import WAIT_S
from tests.integration.spark.held_agent import run_held, wait_for_one

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with local(3, spark_python_task_killTimeout="300s") as running:
        yield running


@pytest.fixture
def folder(jobs, tmp_path, monkeypatch):
    """Where agents are held at the begin of their tasks; none is after the test."""
    monkeypatch.setattr(spark_agent, "run_in_task", functools.partial(run_held, str(tmp_path)))
    (tmp_path / "hold").touch()
    yield tmp_path
    for path in [tmp_path / "hold", *tmp_path.glob("held-*")]:
        path.unlink(missing_ok=True)


def test_an_agent_that_comes_after_its_launch_was_taken_back_is_sent_home(jobs, folder):
    one, ones = jobs.train(1, max_num_proc=2)
    needed, extra = wait_for_one(folder, "held-0-*"), wait_for_one(folder, "held-1-*")
    two, twos = jobs.train(1)
    wait_until(lambda: len(active_jobs(jobs.cluster)) == 1, WAIT_S, "the extra slot is taken back for the second job")
    (folder / "hold").unlink()

    extra.unlink()  # its job is cancelled, and it goes on nevertheless
    assert wait_for_one(folder, "ended-1-*").read_text() == "its launch is over"
    needed.unlink()

    ones.wait_for_world(2)  # with the next launch of that slot
    twos.wait_for_world(1)
    assert len(finished(two, twos)) == 1
    assert len(finished(one, ones)) == 2
    assert not [record for record in one.events() if isinstance(record, (WorkerLeft, PlaceCooledDown))]
