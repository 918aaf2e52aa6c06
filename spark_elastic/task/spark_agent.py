"""The agent as the body of a Spark task: the functions that the driver has Spark run on executors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
from typing import TYPE_CHECKING

from spark_elastic.membership.topology import LaunchId, SlotId
from spark_elastic.spark.executor_process import accelerators_in_task, cores_in_task, nearest_jvm, slot_report
from spark_elastic.task.reaper import handling

if TYPE_CHECKING:
    from spark_elastic.membership.states import AgentOutcome
    from spark_elastic.wire.messages import LaunchSpec


def run_in_task(slot: SlotId, launch: LaunchId, payload: bytes, function: bytes | None = None) -> AgentOutcome:
    """Run the agent of a slot. The payload is a pickled `LaunchSpec`; a large function was broadcast by itself."""
    from spark_elastic.task.agent import run_agent

    spec: LaunchSpec = pickle.loads(payload)
    if function is not None:
        spec = dataclasses.replace(spec, function=function)
    # Spark replaces the daemon that forks its Python workers when a worker dies while it is created. The old daemon
    # then sends SIGHUP to all its children. An agent needs no daemon, and ends when the executor's JVM does.
    with handling(signal.SIGHUP, signal.SIG_IGN):
        return run_agent(spec, slot, launch, slot_report(), guardians())


def prepare_workers(payload: bytes) -> None:
    """Start the executor's fork server, which imports what workers need.

    Called in a Spark task before the job starts. The payload is a `LaunchSpec` without key, function and addresses.
    """
    from spark_elastic.task.fork_server import ForkServer
    from spark_elastic.task.worker_process import worker_environment

    spec: LaunchSpec = pickle.loads(payload)
    env = worker_environment(spec, dict(os.environ), sys.path, cores_in_task(), accelerators_in_task())
    server = ForkServer(guardians(), spec.keep_workers_s, env, spec.preimport)
    with contextlib.suppress(OSError):
        if server.is_possible():
            server.connect().close()


def guardians() -> tuple[int, ...]:
    """Return the processes that a fork server ends with: the executor's JVM and Spark's Python daemon.

    The JVM comes first: an agent ends with it. In local mode it outlives the session, and the daemon does not.
    """
    jvm = nearest_jvm()[0]
    return () if jvm is None else tuple(dict.fromkeys((jvm, os.getppid())))
