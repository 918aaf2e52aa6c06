"""The agent as the body of a Spark task: the functions that the driver has Spark run on executors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from spark_elastic.membership.topology import LaunchId, Reach, SlotId, SlotReport
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


REACH_TIMEOUT_S = 2.0
"""Time for a connection to one address of the driver; a task tries all of them at once."""


def slot_report() -> SlotReport:
    """Describe the slot that this process occupies: executor, host, interfaces, cores and GPUs."""
    return SlotReport(
        host=_host_in_task(),
        executor=executor_id_in_task(),
        addresses=interface_addresses(),
        cores=cores_in_task(),
        accelerators=accelerators_in_task(),
    )


def look_at_slot(
    prepare: bytes | None = None, addresses: Sequence[tuple[str, int]] = (), key: bytes = b""
) -> tuple[SlotReport, Reach]:
    """Describe this slot, and at which addresses of the driver it has reached the driver itself.

    Tries all addresses at the same time, for `REACH_TIMEOUT_S`. With `prepare`, calls `prepare_workers` first.
    """
    if prepare is not None:
        prepare_workers(prepare)
    report = slot_report()
    reached: list[str] = []
    failed: dict[str, str] = {}

    def attempt(host: str, port: int) -> None:
        from spark_elastic.wire.channel import connect

        try:
            connect([(host, port)], key, timeout_s=REACH_TIMEOUT_S).close()
            reached.append(host)
        except Exception as error:
            failed[host] = str(error).partition(f"{host}:{port}: ")[2] or str(error)

    threads = [
        threading.Thread(target=attempt, args=address, name="spark_elastic reach", daemon=True) for address in addresses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * REACH_TIMEOUT_S)
    return report, Reach(report.host, tuple(reached), failed)


def _host_in_task() -> str:
    """Return the machine's address if its name can be resolved; 127.0.0.1 in local mode."""
    if executor_id_in_task() == LOCAL_EXECUTOR:
        return "127.0.0.1"
    return address_of(host_name_in_task() or socket.gethostname())


def run_in_task(slot: SlotId, launch: LaunchId, payload: bytes, function: bytes | None = None) -> AgentOutcome:
    """Run the agent of a slot. The payload is a pickled `LaunchSpec`; a large function was broadcast by itself."""
    from spark_elastic.task.agent import run_agent  # here: discovery imports this module for `slot_report` alone

    order: LaunchSpec = pickle.loads(payload)
    if function is not None:
        order = dataclasses.replace(order, function=function)
    with hangups_ignored():
        return run_agent(order, slot, launch, slot_report(), jvm_pid_in_task(), server_guardians())


def prepare_workers(payload: bytes) -> None:
    """Start the executor's fork server, which imports what workers need. Called in a Spark task before the job starts.

    The payload is a pickled `LaunchSpec` without key, function and addresses.
    """
    from spark_elastic.task.fork_server import ForkServer
    from spark_elastic.task.worker_process import worker_environment

    order: LaunchSpec = pickle.loads(payload)
    env = worker_environment(order, dict(os.environ), sys.path, cores_in_task(), accelerators_in_task())
    server = ForkServer(server_guardians(), order.keep_workers_s, env, order.preimport)
    with contextlib.suppress(OSError):
        if server.is_possible():
            server.connect().close()


def server_guardians() -> tuple[int, ...]:
    """Return the executor's JVM and Spark's Python daemon, with which a fork server ends.

    In local mode the JVM outlives the session, and the daemon does not.
    """
    jvm = jvm_pid_in_task()
    return () if jvm is None else tuple(dict.fromkeys((jvm, os.getppid())))


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
