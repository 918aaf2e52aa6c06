"""Launches that come to nothing: hosts that nobody reaches, and a driver that cannot launch."""

import functools
import pickle
import subprocess
import sys
import time

import pytest

from spark_elastic import LocalLauncher
from spark_elastic.errors import LaunchError, NotEnoughSlotsError, UnknownInterfaceError
from spark_elastic.membership.launcher import LaunchEnd
from spark_elastic.membership.reasons import reported
from tests.integration.local import loops
from tests.integration.processes import wait_until

WAIT_S = 60


class Launcher(LocalLauncher):
    """Calls `run_agent(real, agents, slot)` for each launch; `real(slot)` runs an agent as usual."""

    def __init__(self, run_agent):
        super().__init__(preimport=())
        self._run = run_agent

    def bind(self, spec, on_ended):
        agents = super().bind(spec, on_ended)
        agents._run_agent = functools.partial(self._run, agents._run_agent, agents)
        return agents


def without_interface(agents, slot):
    process = subprocess.run(
        [sys.executable, "-m", "tests.integration.local.bare_agent"],
        input=pickle.dumps((agents.spec, slot, "127.0.0.1", 1)),
        capture_output=True,
    )
    outcome = pickle.loads(process.stdout)
    return LaunchEnd(slot, outcome.cause, outcome)


@pytest.mark.nightly
def test_an_agent_that_nobody_reaches_is_sent_away_and_the_job_goes_on(start_job, tmp_path):
    told = []

    def run_agent(real, agents, slot):
        if slot == 1 and len(told) < 2:
            told.append(without_interface(agents, slot))
            return told[-1]
        return real(slot)

    job = start_job(
        loops.steps, (str(tmp_path), 100_000), num_proc=2, min_num_proc=1, launcher=Launcher(run_agent), verbose=0
    )
    wait_until(lambda: job.status().size == 2, WAIT_S, "the slot gets a usable agent")
    assert ["has no interface that is up and has an IPv4 address" in end.cause.detail for end in told] == [True, True]
    job.cancel()


@pytest.mark.nightly
def test_if_nobody_can_be_reached_the_job_fails_with_that(start_job, tmp_path):
    job = start_job(
        loops.steps,
        (str(tmp_path), 10),
        num_proc=2,
        min_num_proc=1,
        launcher=Launcher(lambda real, agents, slot: without_interface(agents, slot)),
    )
    with pytest.raises(UnknownInterfaceError, match="has no interface that is up and has an IPv4 address"):
        job.result(WAIT_S)


def test_a_driver_that_can_launch_nothing_says_so_at_once(start_job, tmp_path):
    def run_agent(real, agents, slot):
        raise OSError(24, "Too many open files")

    began = time.monotonic()
    job = start_job(loops.steps, (str(tmp_path), 10), num_proc=2, launcher=Launcher(run_agent), start_timeout=300)
    with pytest.raises(LaunchError, match="Too many open files"):
        job.result(WAIT_S)
    assert time.monotonic() - began < WAIT_S


@pytest.mark.nightly
def test_why_an_agent_never_joined_is_told_in_the_wait_and_in_the_error(start_job, tmp_path):
    def run_agent(real, agents, slot):
        return real(slot) if slot == 0 else LaunchEnd(slot, reported("No space left on device"))

    job = start_job(loops.steps, (str(tmp_path), 10), num_proc=2, launcher=Launcher(run_agent), start_timeout=8)
    wait_until(lambda: "No space left on device" in job.status().waiting_for, WAIT_S, "the reason is told")
    with pytest.raises(NotEnoughSlotsError, match="No space left on device"):
        job.result(WAIT_S)
