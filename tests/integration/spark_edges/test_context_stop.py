"""Slots when their SparkContext is stopped."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from spark_elastic.driver.spark.launcher import SparkLauncher
from tests.integration.clusters import local
from tests.integration.processes import wait_until
from tests.integration.spark_edges.fake_agent import WAIT_S, Ends, fake_agent
from tests.leftovers import Before

pytestmark = pytest.mark.cluster


def test_stop_of_the_context_ends_running_and_waiting_slots_and_later_launches(tmp_path):
    before = Before()
    with local(2) as cluster:
        ends, payload = Ends(), f"stay {tmp_path}".encode()
        launcher = SparkLauncher(cluster.sc, fake_agent, lambda slot: payload, ends, description="test")
        for slot in range(6):
            launcher.launch(slot)
        wait_until(lambda: len(cluster.sc.statusTracker().getActiveJobsIds()) == 6, WAIT_S, "all jobs are submitted")
        cluster.spark.stop()
        assert {why for _, why, _, _ in ends.wait_for(6)} == {"the SparkContext was stopped"}
        assert launcher.gone() == "the SparkContext was stopped"
        launcher.launch(0)
        assert [why for _, why, _, _ in ends.wait_for(7)][6] == "the SparkContext was stopped"
        launcher.close(WAIT_S)
        # Spark ends its Python daemon as it stops, and may start a waiting task after that: with a second daemon, which
        # stays until the JVM ends.
        for pid, command in cluster.processes().items():
            if "pyspark.daemon" in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    before.assert_no_threads_left()
