"""Where a Spark task runs: asked inside the task's own Python process.

PySpark's TaskContext knows neither the executor's id nor its address. Both stand in the command line of the executor's
JVM, an ancestor of this process: `... CoarseGrainedExecutorBackend --executor-id 3 --hostname 10.0.0.7 ...`, on
standalone, YARN and Kubernetes alike.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spark_elastic.core.slot_report import SlotReport
from spark_elastic.wire.interfaces import address_of, interface_addresses

LOCAL_EXECUTOR = "driver"
_LOG_URL = re.compile(r"[?&]executorId=([^&]+)")


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


def executor_id_in_task() -> str:
    """Spark's id of the executor; "driver" in local mode."""
    return executor_id_of(_jvm_command(), os.environ)


def host_in_task() -> str:
    """The machine, as an IPv4 address where its name can be resolved; 127.0.0.1 in local mode."""
    command = _jvm_command()
    if executor_id_of(command, os.environ) == LOCAL_EXECUTOR:
        return "127.0.0.1"
    return address_of(_option(command or (), "--hostname") or socket.gethostname())


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


def executor_id_of(jvm_command: Sequence[str] | None, environment: Mapping[str, str]) -> str:
    """The executor id in the command line of a task's JVM; None as command: it could not be read.

    Without a command line the environment may tell: Kubernetes sets the id, standalone the address of the log page.
    """
    if jvm_command is not None:
        return _option(jvm_command, "--executor-id") or LOCAL_EXECUTOR
    if given := environment.get("SPARK_EXECUTOR_ID"):
        return given
    if url := _LOG_URL.search(environment.get("SPARK_LOG_URL_STDOUT", "")):
        return url.group(1)
    return LOCAL_EXECUTOR


def jvm_pid_in_task() -> int | None:
    """The process id of the executor's JVM (in local mode the driver's); None if it cannot be seen."""
    return next((pid for pid, command in _processes_above() if Path(command[0]).name == "java"), None)


def _option(command: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(command[:-1]):
        if word == name:
            return command[index + 1]
    return None


def _jvm_command() -> list[str] | None:
    """The command line of the nearest JVM above this process; None if there is none to be seen."""
    return next((command for _, command in _processes_above() if Path(command[0]).name == "java"), None)


def _processes_above() -> Iterator[tuple[int, list[str]]]:
    pid = os.getppid()
    while pid > 1:
        seen = _process(pid)
        if seen is None:
            return
        parent, command = seen
        if command:
            yield pid, command
        pid = parent


def _process(pid: int) -> tuple[int, list[str]] | None:
    """Parent and command line of a process; None if it cannot be read."""
    try:
        if Path("/proc/self/stat").exists():
            stat = Path(f"/proc/{pid}/stat").read_text()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            return int(stat.rpartition(")")[2].split()[1]), words[:-1]
        said = subprocess.run(["ps", "-o", "ppid=,command=", "-p", str(pid)], capture_output=True, text=True, timeout=5)
        parent, *command = said.stdout.split()
        return int(parent), command
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
