"""A driver that stands still for longer than its workers' heartbeats may be late: nobody is lost for it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.integration.local.standing_still import HEARTBEAT_TIMEOUT_S, STEPS
from tests.integration.processes import GONE_S, MARK, assert_gone, marked, wait_until

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]


@pytest.fixture
def driver(tmp_path):
    """Starts the program; checks afterwards that nothing of it is left."""
    mark = uuid.uuid4().hex
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.local.standing_still", str(tmp_path)],
            cwd=ROOT,
            env=dict(os.environ, **{MARK: mark}),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    assert_gone(lambda: marked(mark), GONE_S)


def step(folder):
    steps = Path(folder, "steps")
    return steps.stat().st_size if steps.exists() else 0


def outcome(driver, folder):
    assert driver.wait(timeout=120) == 0
    told = json.loads(Path(folder, "outcome.json").read_text())
    assert {steps for steps, _ in told["results"]} == {STEPS}
    assert len({str(weights) for _, weights in told["results"]}) == 1
    return told


def stop_until_well_past_the_heartbeats(driver, folder):
    """SIGSTOP the driver; SIGCONT it three heartbeat timeouts later."""
    wait_until(lambda: step(folder) > 5, 90, "the training begins")
    os.kill(driver.pid, signal.SIGSTOP)
    began, before = time.monotonic(), step(folder)
    # the length of the pause is what is tested
    time.sleep(max(0.0, 3 * HEARTBEAT_TIMEOUT_S - (time.monotonic() - began)))
    during = step(folder) - before
    os.kill(driver.pid, signal.SIGCONT)
    Path(folder, "hurry").touch()
    return during


def test_workers_train_on_while_their_driver_is_stopped_and_it_takes_them_back(driver, tmp_path):
    running = driver()
    steps_meanwhile = stop_until_well_past_the_heartbeats(running, tmp_path)
    told = outcome(running, tmp_path)
    assert steps_meanwhile > 20
    assert (told["sizes"], told["left"]) == ([2], [])
    assert max(told["stood_still"]) > HEARTBEAT_TIMEOUT_S
