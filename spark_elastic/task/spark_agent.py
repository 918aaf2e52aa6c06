"""The agent as the body of a Spark task: what the Spark launcher runs on executors."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId, SlotReport
from spark_elastic.task.agent import run_agent
from spark_elastic.task.executor_process import LOCAL_EXECUTOR, executor_id_in_task, host_name_in_task, jvm_pid_in_task
from spark_elastic.wire.interfaces import address_of, interface_addresses
from spark_elastic.wire.launch_spec import LaunchSpec

# Where a Spark task runs and what it may use: asked inside the task's own Python process.


def slot_report() -> SlotReport:
    """The executor, host, interfaces, cores and accelerators of the task that this process runs."""
    return SlotReport(
        host=host_in_task(),
        executor=executor_id_in_task(),
        addresses=interface_addresses(),
        cores=cores_in_task(),
        accelerators=accelerators_in_task(),
        python=sys.version.split()[0],
    )


def host_in_task() -> str:
    """The machine, as an IPv4 address where its name can be resolved; 127.0.0.1 in local mode."""
    if executor_id_in_task() == LOCAL_EXECUTOR:
        return "127.0.0.1"
    return address_of(host_name_in_task() or socket.gethostname())


def cores_in_task() -> int:
    """Cores that Spark set aside for the task; 1 outside of a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return max(int(context.cpus()), 1) if context is not None else 1


def accelerators_in_task() -> tuple[str, ...]:
    """Addresses of the GPUs that Spark gave to the task; empty without `spark.task.resource.gpu.amount`."""
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    return tuple(str(address) for address in gpus.addresses) if gpus is not None else ()


def run_in_task(slot: SlotId, launch: LaunchId, payload: bytes, function: bytes | None = None) -> AgentOutcome:
    """Run the agent of a slot.

    Args:
        payload: a pickled `LaunchSpec`, which Spark's own serialisation brought here.
        function: the order's, if it came by another way.
    """
    order: LaunchSpec = pickle.loads(payload)
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
