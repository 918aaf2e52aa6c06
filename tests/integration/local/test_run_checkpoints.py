"""Loops of one's own outlive their driver, and the loss of all workers at once, by their checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import spark_elastic
from spark_elastic.data.store import Store
from spark_elastic.elastic.run_checkpoints import folder_of
from spark_elastic.errors import RunTakenError, StateLostError
from spark_elastic.runs.checkpoints import Checkpoints
from tests.integration.local.resumable_program import settings, train, undisturbed
from tests.integration.processes import children, command_line, is_running, wait_until

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0
LIMIT = 8


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder_of(Store.create(folder / "runs" / "one"), 1))


def newest_step(folder: Path) -> int:
    found = checkpoints(folder).complete()
    return found[-1].step if found else 0


def kill(pids: list[int]) -> None:
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts a driver whose workers wait at a step; kills what is left of it."""
    started: list[subprocess.Popen[bytes]] = []

    def start(pause_at: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.integration.local.resumable_program", str(tmp_path), "first"]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*command, str(LIMIT), str(pause_at)], cwd=ROOT, stdout=log, stderr=log)
        started.append(process)
        return process

    yield start
    for process in started:
        kill([process.pid, *children(process.pid)])
        process.wait(WAIT_S)


def assert_resumed_at(returned: list[Any], first: int) -> None:
    assert [list(each) for each in returned] == [[first, list(range(LIMIT)), undisturbed(LIMIT)]] * 2


@pytest.mark.nightly
def test_a_second_driver_is_refused_and_resumes_once_the_first_was_killed(
    tmp_path: Path, driver: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    first = driver(5)

    def written() -> bool:
        assert first.poll() is None, (tmp_path / "log").read_text()
        return newest_step(tmp_path) == 5

    wait_until(written, WAIT_S, "the checkpoint of step 5")
    with pytest.raises(RunTakenError, match=rf"is held by the driver with pid {first.pid}.*another run_id"):
        spark_elastic.run(train, (LIMIT,), **settings(tmp_path))
    workers = children(first.pid)
    kill([first.pid])
    wait_until(lambda: not any(map(is_running, workers)), WAIT_S, "the end of the workers")
    assert not (tmp_path / "outcome-first").exists()
    assert_resumed_at(spark_elastic.run(train, (LIMIT,), **settings(tmp_path)), 5)


def test_a_job_that_lost_all_workers_at_once_names_what_can_be_resumed(tmp_path: Path, start_job: Any) -> None:
    given = settings(tmp_path)
    job = start_job(train, (LIMIT, 4), **given)
    wait_until(lambda: newest_step(tmp_path) == 4 or job.done(), WAIT_S, "the checkpoint of step 4")
    kill([worker for worker in children(os.getpid()) if is_worker(worker)])
    with pytest.raises(StateLostError) as raised:
        job.result(WAIT_S)
    resumable = f"run_id='one' in {tmp_path / 'runs' / 'one'} has step 4: call run again with the same checkpoint_dir"
    assert resumable in str(raised.value)
    assert resumable in str(job.changes()[-1])
    assert_resumed_at(start_job(train, (LIMIT,), **given).result(WAIT_S), 4)


def is_worker(pid: int) -> bool:
    return "spark_elastic.task.main" in command_line(pid)
