"""Signals that reach the agent of a Spark task."""

from __future__ import annotations

import os
import signal

from spark_elastic.task.spark_agent import hangups_ignored


def test_agent_survives_the_hangup_of_the_daemon_that_forked_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with hangups_ignored():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is before
