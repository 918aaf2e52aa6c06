"""The executor's JVM above a Spark task, and what its command line tells.

PySpark's TaskContext knows neither the executor's id nor its address. Both stand in the command line of the executor's
JVM, an ancestor of this process: `... CoarseGrainedExecutorBackend --executor-id 3 --hostname 10.0.0.7 ...`, on
standalone, YARN and Kubernetes alike. Standard library only: `checkup` sends this source to executors that may not
have the package.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LOCAL_EXECUTOR = "driver"
_LOG_URL = re.compile(r"[?&]executorId=([^&]+)")


def executor_id_in_task() -> str:
    """Spark's id of the executor; "driver" in local mode."""
    return executor_id_of(_jvm_command(), os.environ)


def host_name_in_task() -> str | None:
    """The executor's host as Spark names it; None where its command line does not say."""
    return _option(_jvm_command() or (), "--hostname")


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
