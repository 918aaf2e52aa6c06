"""What an agent reports about its worker, and what it leaves as it was."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from typing import Any

from spark_elastic.membership.topology import SlotReport
from spark_elastic.task.agent import TaskAgent
from spark_elastic.task.reaper import default_child_signal
from spark_elastic.task.worker_process import memory_kills
from spark_elastic.wire.messages import LaunchSpec, WorkerDying, WorkerExited


class Worker:
    worker, stderr_tail = 7, ""

    def __init__(self) -> None:
        self.memory_before = memory_kills()


REPORT = SlotReport("h", "1", {}, 1, ())


def reports_of(guardian_signal: int | None) -> list[object]:
    """Return what an agent sends when its worker is killed, after the guardian has got a signal."""

    async def live() -> list[object]:
        with subprocess.Popen(["sleep", "60"]) as guardian:
            agent = TaskAgent(LaunchSpec("job", (), b"", b"", 1.0, ""), 0, 0, REPORT, [guardian.pid])
            sent: list[object] = []
            agent._send = sent.append
            agent._watch_guardian()
            if guardian_signal is not None:
                guardian.send_signal(guardian_signal)
                await asyncio.wait_for(agent._over.wait(), 20)
            worker: Any = Worker()
            agent.dying(worker, -9)
            agent.exited(worker, -9)
            guardian.kill()
        return sent

    return asyncio.run(live())


def test_killed_worker_is_reported_with_its_signal() -> None:
    assert reports_of(None) == [WorkerDying(7, -9), WorkerExited(7, -9, "", 0, "")]


def test_worker_that_ends_with_its_executor_is_reported_without_a_cause() -> None:
    assert reports_of(signal.SIGTERM) == [WorkerDying(7, None)]


def test_child_signal_is_ignored_again_after_the_block() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with default_child_signal():
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
