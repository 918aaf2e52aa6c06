"""Facts about the Spark task that this process runs: its executor, host, cores and GPUs.

PySpark's TaskContext knows neither the executor's id nor its address. Both are in the command line of the executor's
JVM, an ancestor of this process: `... CoarseGrainedExecutorBackend --executor-id 3 --hostname 10.0.0.7 ...`, on
standalone, YARN and Kubernetes alike.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LOCAL_EXECUTOR = "driver"
_LOG_URL = re.compile(r"[?&]executorId=([^&]+)")


def executor_id_in_task() -> str:
    """Return Spark's id of the executor; "driver" in local mode and outside of tasks."""
    return executor_id_of(_nearest_jvm()[1], os.environ)


def host_name_in_task() -> str | None:
    """Return the executor's host as Spark names it; None if the JVM's command line does not have it."""
    return _option(_nearest_jvm()[1] or (), "--hostname")


def cores_in_task() -> int:
    """Return the number of cores that Spark set aside for the task; 1 outside of a task."""
    context = _task_context()
    return max(int(context.cpus()), 1) if context is not None else 1


def accelerators_in_task() -> tuple[str, ...]:
    """Return the addresses of the task's GPUs; empty without `spark.task.resource.gpu.amount`."""
    context = _task_context()
    gpus = context.resources().get("gpu") if context is not None else None
    return tuple(str(address) for address in gpus.addresses) if gpus is not None else ()


def executor_id_of(jvm_command: Sequence[str] | None, environment: Mapping[str, str]) -> str:
    """Return the executor id in the command line of a task's JVM.

    Without a command line (None: it could not be read) the environment may have it: Kubernetes sets the id itself,
    standalone clusters the address of the executor's log page.
    """
    if jvm_command is not None:
        return _option(jvm_command, "--executor-id") or LOCAL_EXECUTOR
    if given := environment.get("SPARK_EXECUTOR_ID"):
        return given
    if url := _LOG_URL.search(environment.get("SPARK_LOG_URL_STDOUT", "")):
        return url.group(1)
    return LOCAL_EXECUTOR


def jvm_pid_in_task() -> int | None:
    """Return the process id of the executor's JVM (in local mode the driver's); None if it is not visible."""
    return _nearest_jvm()[0]


def _task_context() -> Any:
    try:
        from pyspark import TaskContext
    except ImportError:
        return None
    return TaskContext.get()


def _option(command: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(command[:-1]):
        if word == name:
            return command[index + 1]
    return None


def _nearest_jvm() -> tuple[int, list[str]] | tuple[None, None]:
    """Return process id and command line of the nearest JVM above this process; None if none is visible."""
    return next((found for found in _processes_above() if Path(found[1][0]).name == "java"), (None, None))


def _processes_above() -> Iterator[tuple[int, list[str]]]:
    pid = os.getppid()
    while pid > 1:
        found = _process(pid)
        if found is None:
            return
        parent, command = found
        if command:
            yield pid, command
        pid = parent


def _process(pid: int) -> tuple[int, list[str]] | None:
    """Return parent and command line of a process; None if they cannot be read."""
    try:
        if Path("/proc/self/stat").exists():
            stat = Path(f"/proc/{pid}/stat").read_text()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            return int(stat.rpartition(")")[2].split()[1]), words[:-1]
        listed = subprocess.run(
            ["ps", "-o", "ppid=,command=", "-p", str(pid)], capture_output=True, text=True, timeout=5
        )
        parent, *command = listed.stdout.split()
        return int(parent), command
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
