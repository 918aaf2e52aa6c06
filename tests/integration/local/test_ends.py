"""Workers that die before the elastic loop, between two loops and after the loop, under the real driver."""

import os
import signal
import threading

import pytest

from spark_elastic.membership.states import WorkerState
from spark_elastic.membership.timeline import WorldStarted
from tests.integration.local import ends
from tests.integration.processes import wait_until

PREIMPORT = ("torch", "spark_elastic.torch")
WAIT_S = 90


@pytest.fixture(scope="module")
def undisturbed():
    """Weights after 10 steps: all ranks train on the same rows, so that how many there are changes nothing."""
    model, optimizer = ends.make()
    loop, state = ends.train_for(model, optimizer, 10)
    loop(state)
    return pytest.approx(ends.weights(model), abs=1e-6)


def sizes(job):
    return [record.size for record in job.timeline() if isinstance(record, WorldStarted)]


def check(results, undisturbed):
    size = len(results)
    for rank, result in enumerate(results):
        assert result == (rank, size, list(range(size)), "10 steps", 10, 10, undisturbed)


@pytest.mark.parametrize(
    "deaths",
    [[("gathered", 2), ("save", 0)], [("init", 1), ("saved", 1)]],
    ids=lambda deaths: ", ".join(f"rank {rank} at {place}" for place, rank in deaths),
)
def test_a_worker_that_dies_outside_of_the_loop_takes_no_result_along(start_job, tmp_path, undisturbed, deaths):
    job = start_job(ends.with_an_end, (str(tmp_path), deaths), num_proc=3, min_num_proc=1, preimport=PREIMPORT)
    results = job.result(WAIT_S)
    assert len(list(tmp_path.glob("death-*"))) == len(deaths)
    check(results, undisturbed)
    assert sizes(job)[-1] == len(results)
    assert any("saved by" in line for line in ends.diary(tmp_path))


@pytest.fixture(scope="module")
def after_two_loops():
    model, optimizer = ends.make()
    loop, state = ends.train_for(model, optimizer, 6)
    loop(state)
    for _ in range(8):
        ends.one_step(model, optimizer, value=2.0)
    return pytest.approx(ends.weights(model), abs=1e-6)


@pytest.mark.parametrize(
    ("deaths", "members"),
    [([("in second", 1)], 2), ([("between", 0), ("after second", 0)], 0)],
    ids=["a newcomer comes to the second loop", "between and after the second"],
)
def test_two_loops_in_one_function(start_job, tmp_path, after_two_loops, deaths, members):
    job = start_job(
        ends.two_loops, (str(tmp_path), deaths, members), num_proc=members or 3, min_num_proc=1, preimport=PREIMPORT
    )
    results = job.result(WAIT_S)
    assert len(list(tmp_path.glob("death-*"))) == len(deaths)
    size = len(results)
    assert size >= members
    for rank, result in enumerate(results):
        assert result == (rank, size, float(size), "6 steps", "8 more", 8, 8, after_two_loops)


def cannot_be_pickled(said):
    return said, threading.Lock()


@pytest.mark.nightly
def test_a_newcomer_that_cannot_have_an_earlier_loops_result_does_not_end_the_job(start_job, tmp_path, capfd):
    arguments = str(tmp_path), [("in second", 1)], 0, cannot_be_pickled, "go"
    job = start_job(ends.two_loops, arguments, num_proc=2, min_num_proc=1, preimport=PREIMPORT)
    called = lambda: sum("called" in line for line in ends.diary(tmp_path))  # noqa: E731
    wait_until(lambda: called() >= 4, WAIT_S, "the newcomer has gone, and another one has come")
    (tmp_path / "go").touch()
    ((rank, size, _, first, *_, steps, _, _),) = job.result(WAIT_S)
    assert (rank, size, steps) == (0, 1, 8)
    assert first.startswith("('6 steps', <unlocked")
    assert "cannot be replaced: the result of loop 1 cannot be sent to new ones, because it" in capfd.readouterr().err


def with_worker_2_done(start_job, folder):
    settings = {"num_proc": 2, "min_num_proc": 1, "preimport": PREIMPORT, "cooldown_range": None}
    job = start_job(ends.done_one_after_the_other, (str(folder),), **settings)
    wait_until(lambda: 2 in job._driver._machine.registry.states[WorkerState.DONE], WAIT_S, "worker 2 is done")
    return job


@pytest.mark.nightly
def test_a_finished_workers_result_that_is_lost_with_its_agent_is_made_again(start_job, tmp_path):
    job = with_worker_2_done(start_job, tmp_path)
    agents = job._driver._launcher._processes
    os.kill(agents[job._driver._machine.registry.workers[2].place.slot].pid, signal.SIGKILL)
    wait_until(lambda: "round 1 broke" in job.status().waiting_for, WAIT_S, "the loss is seen")
    assert "after the loop" in job.status().waiting_for
    (tmp_path / "go").touch()
    results = job.result(WAIT_S)
    assert [(rank, step) for rank, step, _, _ in results] == [(rank, 10) for rank in range(len(results))]
    survivor = next(line for line in ends.diary(tmp_path) if line.startswith("rank 0"))
    assert results[0][3] is False, "it was called again"
    assert f"process {results[0][2]} " in survivor, "in the same process"


def test_a_finished_worker_is_run_again_in_its_process_when_another_dies(start_job, tmp_path):
    job = with_worker_2_done(start_job, tmp_path)
    wait_until(lambda: len(ends.diary(tmp_path)) >= 2, WAIT_S, "both have come behind the loop")
    entries = dict(line.split(" process ") for line in ends.diary(tmp_path))
    first, second = (int(entries[f"rank {rank}"].split()[0]) for rank in range(2))
    (tmp_path / "go").touch()
    os.kill(first, signal.SIGKILL)
    results = job.result(WAIT_S)
    assert [(rank, step) for rank, step, _, _ in results] == [(rank, 10) for rank in range(len(results))]
    assert (results[0][2], results[0][3]) == (second, False)
