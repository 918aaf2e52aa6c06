"""`tests.integration.processes`: what the tests ask about processes, at the moments at which these end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.processes import is_running, our_processes


def test_a_process_that_ends_while_it_is_looked_at_is_not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(path: object, **options: object) -> os.stat_result:
        raise ProcessLookupError(3, "No such process", path)

    monkeypatch.setattr(os, "stat", ends)
    assert not is_running(os.getpid())


def test_a_zombie_is_not_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(process.pid)
    process.communicate()
    assert not is_running(process.pid)


def test_ours_are_known_by_their_module_wherever_python_is_installed() -> None:
    waits = ["-c", "input()", "-m"]
    processes = [
        subprocess.Popen([name, *waits, module], executable=sys.executable, stdin=subprocess.PIPE)
        for name, module in (("/spark_elastic/bin/python", "pyspark.daemon"), ("python", "spark_elastic.task.main"))
    ]
    assert list(our_processes()) == [processes[1].pid]
    for process in processes:
        process.communicate(b"\n")
