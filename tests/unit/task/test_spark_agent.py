"""What the agent of a Spark task does with signals."""

from __future__ import annotations

import os
import signal

from spark_elastic.task.spark_agent import hangups_ignored


def test_an_agent_outlives_the_hangup_with_which_spark_ends_a_daemon() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with hangups_ignored():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is before
