"""What the agent of a Spark task does with signals."""

from __future__ import annotations

import os
import signal

from spark_elastic.task.spark_agent import deaf_to_hangups


def test_an_agent_outlives_the_hangup_with_which_spark_ends_a_daemon() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with deaf_to_hangups():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is before
