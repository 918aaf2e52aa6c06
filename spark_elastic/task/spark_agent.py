"""The agent as the body of a Spark task: what the Spark launcher runs on executors."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal
import threading
from collections.abc import Iterator

from spark_elastic.core.outcome import AgentOutcome
from spark_elastic.core.topology import LaunchId, SlotId
from spark_elastic.task.agent import run_agent
from spark_elastic.task.executor_process import jvm_pid_in_task
from spark_elastic.task.spark_task import slot_report
from spark_elastic.wire.handover import AgentOrder


def run_in_task(slot: SlotId, launch: LaunchId, payload: bytes, function: bytes | None = None) -> AgentOutcome:
    """Run the agent of a slot.

    Args:
        payload: a pickled `AgentOrder`, which Spark's own serialisation brought here.
        function: the order's, if it came by another way.
    """
    order: AgentOrder = pickle.loads(payload)
    if function is not None:
        order = dataclasses.replace(order, function=function)
    with deaf_to_hangups():
        return run_agent(order, slot, launch, slot_report(), jvm_pid_in_task())


@contextlib.contextmanager
def deaf_to_hangups() -> Iterator[None]:
    """Ignore SIGHUP meanwhile.

    Spark replaces the daemon that forks its Python workers when one of them dies while it is made, and the old daemon
    hangs up all its children, whatever they do. An agent needs no daemon: its own socket leads to the executor's JVM,
    and it ends when that does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's to handle
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)
