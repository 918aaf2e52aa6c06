"""The agent as the body of a Spark task: the functions that the driver has Spark run on executors."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spark_elastic.membership.topology import LaunchId, SlotId, SlotReport
from spark_elastic.task.executor_process import (
    LOCAL_EXECUTOR,
    accelerators_in_task,
    cores_in_task,
    executor_id_in_task,
    host_name_in_task,
    jvm_pid_in_task,
)
from spark_elastic.wire.interfaces import address_of, interface_addresses

if TYPE_CHECKING:
    from spark_elastic.membership.states import AgentOutcome
    from spark_elastic.wire.messages import LaunchSpec


def slot_report() -> SlotReport:
    """Describe the slot that this process occupies: executor, host, interfaces, cores and GPUs."""
    return SlotReport(
        host=_host_in_task(),
        executor=executor_id_in_task(),
        addresses=interface_addresses(),
        cores=cores_in_task(),
        accelerators=accelerators_in_task(),
        python=sys.version.split()[0],
    )


def _host_in_task() -> str:
    """Return the machine's IPv4 address if its name can be resolved; 127.0.0.1 in local mode."""
    if executor_id_in_task() == LOCAL_EXECUTOR:
        return "127.0.0.1"
    return address_of(host_name_in_task() or socket.gethostname())


def run_in_task(slot: SlotId, launch: LaunchId, payload: bytes, function: bytes | None = None) -> AgentOutcome:
    """Run the agent of a slot.

    Args:
        slot: the slot that the task occupies.
        launch: number of the slot's launch.
        payload: a pickled `LaunchSpec`; it has come in Spark's own serialisation.
        function: the user's function, if it was broadcast because it is large.
    """
    from spark_elastic.task.agent import run_agent  # here: discovery imports this module for `slot_report` alone

    order: LaunchSpec = pickle.loads(payload)
    if function is not None:
        order = dataclasses.replace(order, function=function)
    with hangups_ignored():
        return run_agent(order, slot, launch, slot_report(), jvm_pid_in_task())


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Ignore SIGHUP within this context.

    Spark replaces the daemon that forks its Python workers when a worker dies while it is created. The old daemon
    then sends SIGHUP to all its children, whatever they do. An agent needs no daemon: its socket leads to the
    executor's JVM, and the agent ends when the JVM does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)
