"""Which processes a test started, however deep, also when their parents are gone: by a mark in their environment."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "TESTS_OF_SPARK_ELASTIC_MARK"
"""The package's own prefix would be taken for a job's, whose variables do not reach fork servers."""

GONE_S = 20.0
"""For what ends at once to be gone. Far longer than it takes, so that a busy machine is not a failure."""


def marked(mark: str) -> dict[int, str]:
    """Return pid → command line of the living processes whose environment contains the mark."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            its = needle in (entry / "environ").read_bytes().split(b"\0")
            if its and (command := command_line(int(entry.name))):
                found[int(entry.name)] = command
        except OSError:  # it ended while we looked, or is not ours
            continue
    return found


KEPT: dict[str, Any] = {"keep_workers": 20, "env": {"PYTEST_CURRENT_TEST": ""}}
"""Settings of jobs whose workers import torch: one process imports it, and forks the workers of all these jobs. That
takes the same environment."""

OF_THIS_PROCESS = uuid.uuid4().hex
"""The mark of this process's jobs."""


def left_by_jobs(mark: str = OF_THIS_PROCESS) -> dict[int, str]:
    """Return those with the mark, without this process and fork servers; a server's workers are below it."""
    found = {pid: command for pid, command in marked(mark).items() if pid != os.getpid()}
    return without_servers(found)


def without_servers(found: dict[int, str]) -> dict[int, str]:
    """Return the processes but fork servers, whose workers have the same command line."""
    forked = {pid for pid, command in found.items() if "spark_elastic.task.fork_server" in command}
    return {pid: command for pid, command in found.items() if pid not in forked or parent_of(pid) in forked}


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_running(pid: int) -> bool:
    """Return True if a process of this user runs or is stopped, False if it has ended, even as a zombie.

    For a moment the kernel answers ESRCH about a process that ends. `Path.exists` raises that as ProcessLookupError in
    Python 3.11; `os.path.exists` takes every OSError as "no".
    """
    return os.path.exists(f"/proc/{pid}/exe")


def command_line(pid: int) -> str:
    """Return the command line of a process; "" of one that has ended, as a zombie too."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Living descendants of a process, parents first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = parents.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def our_processes() -> dict[int, str]:
    """Return pid → command line of this package's agents and workers below this process.

    Spark's own processes are not among them, wherever their Python is installed: a daemon lives as long as its session.
    """
    commands = {pid: command_line(pid) for pid in children(os.getpid())}
    return {pid: command for pid, command in commands.items() if "-m spark_elastic.task" in command}


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Poll, at first every 10 ms; returns the seconds it took. Raises AssertionError naming `what` at the deadline."""
    start, pause = time.monotonic(), 0.01
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
    return time.monotonic() - start


def wait_for_file(folder: Path, name: str, timeout_s: float, what: str) -> None:
    """Wait until a file of this name is somewhere below the folder, while others may delete folders in it.

    `Path.rglob` raises FileNotFoundError if a folder is deleted while it looks into it; `glob.glob` does not.
    """
    wait_until(lambda: glob.glob(f"{glob.escape(str(folder))}/**/{name}", recursive=True), timeout_s, what)


def _doing(pid: int) -> str:
    """Return parent, state, age in seconds and system call of a process, to tell why it is still there."""
    words = subprocess.run(
        ["ps", "-o", "ppid=,stat=,etimes=,wchan=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return " ".join(f"{name} {word}" for name, word in zip(("parent", "state", "age", "in"), words, strict=False))


def waits_for_a_jvm(pid: int, command: str) -> bool:
    """Return True for a Python worker whose task Spark cancelled at the wrong moment: its daemon has ended, and it
    waits for its JVM, with which it ends. Agents wait in another system call.
    """
    doing = _doing(pid)
    return "pyspark.daemon" in command and doing.startswith("parent 1 ") and doing.endswith("in wait_woken")


def assert_gone(processes: Callable[[], dict[int, str]], timeout_s: float) -> None:
    """Raises AssertionError with what is left at the deadline, and what it was doing, after killing it."""
    start = time.monotonic()
    left = processes()
    while left and time.monotonic() - start < timeout_s:
        time.sleep(0.05)
        left = processes()
    doing = {pid: _doing(pid) for pid in left}
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if left:
        lines = "\n".join(f"  {pid} {command[:200]} ({doing[pid]})" for pid, command in left.items())
        raise AssertionError(f"still there {timeout_s} s after the end:\n{lines}")
