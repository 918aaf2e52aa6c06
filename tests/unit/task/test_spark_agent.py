"""Signals that reach the agent of a Spark task."""

from __future__ import annotations

import os
import signal

from spark_elastic.task.reaper import handling


def test_agent_survives_the_hangup_of_the_daemon_that_forked_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with handling(signal.SIGHUP, signal.SIG_IGN):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is before
