"""The Spark edges on `local[4]`: no executors, tasks in the driver's own JVM."""

from __future__ import annotations

import os

import psutil
import pytest

from spark_elastic.errors import NotEnoughSlotsError, NotPicklableError
from spark_elastic.membership.reasons import Wait, WaitKind, reported
from spark_elastic.spark.classic import ClassicCluster
from spark_elastic.spark.discovery import SlotWait, wait_for_slots
from spark_elastic.spark.launcher import SparkLauncher
from spark_elastic.spark.session import cluster_of
from tests.integration.clusters import local, module_fixture
from tests.integration.processes import wait_until
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent, probe, started
from tests.leftovers import Before, nothing_left

pytestmark = pytest.mark.cluster
cluster = module_fixture(local, 4, spark_driver_maxResultSize="4m")


@pytest.fixture
def launch(cluster):
    """launch(payload) → (launcher, ends); everything is closed after the test, and nothing may be left of it."""
    before = Before()
    launchers = []

    def build(payload: str, on_ended=None):
        ends = on_ended or Ends()
        launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: payload.encode(), ends, description="test")
        launchers.append(launcher)
        return launcher, ends

    yield build
    for launcher in launchers:
        launcher.close(WAIT_S)  # which ends as soon as all has
    before.assert_no_threads_left()
    assert cluster.sc.statusTracker().getActiveJobsIds() == []


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [True, False])
def test_agents_that_are_kept_apart_run_in_no_python_worker_that_ran_anything_before(cluster, launch, apart):
    others = set(cluster.sc.parallelize(range(8), 4).map(lambda _: os.getpid()).collect())
    launcher, ends = launch("pid")
    launcher._apart = apart
    pids = []
    for count in (1, 2):
        launcher.launch(0)
        pids.append(int(ends.wait_for(count)[-1][2].result))
    assert len(set(pids) - others) == (2 if apart else 0)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("raise too warm", "the agent raised ArithmeticError: too warm"),
        ("exit 3", "the agent's Python process died"),
        ("missing spark_elastic.task", "the executors cannot import spark_elastic: install it"),
        ("big 9000000", "raise spark.driver.maxResultSize"),
    ],
)
def test_failure_of_an_agent_is_told_in_one_line(launch, payload, reason):
    launcher, ends = launch(payload)
    launcher.launch(0)
    [(_, why, outcome, _)] = ends.wait_for(1)
    assert reason in why
    assert "\n" not in why
    assert outcome is None


@pytest.mark.nightly
def test_withdrawn_slot_ends_at_once_and_the_others_go_on(launch, tmp_path):
    launcher, ends = launch(f"stay {tmp_path}")
    launcher.launch(0)
    launcher.launch(1)
    started(tmp_path, 2)
    launcher.withdraw(0, reported("host left the discovery"))
    launcher.withdraw(0, reported("and again"))
    [(slot, why, outcome, _)] = ends.wait_for(1)
    assert (slot, why, outcome) == (0, "host left the discovery", None)
    launcher.withdraw(0, reported("over already"))
    assert len(ends.seen) == 1


@pytest.mark.nightly
def test_launches_leave_no_threads_and_no_descriptors(cluster, launch):
    me, jvm = psutil.Process(), psutil.Process(cluster.driver_jvm)
    launcher, ends = launch("return x")

    def launches():
        before = len(ends.seen)
        for slot in range(6):
            launcher.launch(slot)
        ends.wait_for(before + 6)

    launches()
    mine, of_the_jvm = me.num_fds(), jvm.num_fds()
    with nothing_left():
        launches()
        launches()
    # either may open some of its own: fewer than one for each launch
    wait_until(lambda: me.num_fds() < mine + 12, WAIT_S, "connections to the JVM to close")
    wait_until(lambda: jvm.num_fds() < of_the_jvm + 12, WAIT_S, "the JVM to close them too")


# --- discovery ----------------------------------------------------------------------------------


def test_probe_reports_the_driver_as_executor(cluster):
    reports = [report for report, _ in probe(cluster.sc, 4, 30.0).seen]
    assert [(r.executor, r.host, r.cores, r.accelerators) for r in reports] == [("driver", "127.0.0.1", 1, ())] * 4
    assert reports[0].addresses["lo"][0] == "127.0.0.1"


def fails():
    raise RuntimeError("a task of a probe has run")


def test_free_slots_of_the_same_executors_are_not_probed_again(cluster):
    found = probe(cluster.sc, 4, 30.0)
    wait_until(lambda: cluster_of(cluster.sc).slots_free() == 4, WAIT_S, "all slots are free")
    assert probe(cluster.sc, 4, 30.0, fails) == found
    assert probe(cluster.sc, 2, 30.0, fails).seen == found.seen[:2]


class MayGrow(ClassicCluster):
    """A cluster that other executors may join."""

    def fixed_slots(self):
        return None


def test_too_few_slots_are_reported_with_the_numbers_after_the_timeout(cluster):
    said: list[Wait] = []
    with pytest.raises(NotEnoughSlotsError, match="4 of 5 slots were available after 0 s") as caught:
        wait_for_slots(MayGrow(cluster.sc), 5, 0.3, SlotWait(show=lambda wait, until: said.append(wait)))
    assert "1 executor with 4 slots in all (spark.task.cpus=1)" in str(caught.value)
    assert said == [Wait(WaitKind.SLOTS, have=4, need=5, left_s=0.3)]


@pytest.mark.nightly
def test_probe_of_busy_slots_ends_at_its_deadline_and_leaves_no_job(cluster, launch, tmp_path):
    launcher, _ = launch(f"stay {tmp_path}")
    launcher.launch(0)
    started(tmp_path, 1)
    with pytest.raises(NotEnoughSlotsError, match="but never 4 free at the same time"):
        probe(cluster.sc, 4, 2.0)
    wait_until(lambda: len(cluster.sc.statusTracker().getActiveJobsIds()) == 1, WAIT_S, "the probe's job is gone")


# --- what is pickled ----------------------------------------------------------------------------------


def test_pickled_call_names_a_captured_spark_session(cluster):
    from spark_elastic.driver.pickled_call import pickled

    session = cluster.spark
    with pytest.raises(NotPicklableError, match="session"):
        pickled(lambda: session.range(3))
