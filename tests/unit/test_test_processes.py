"""`tests.integration.processes`: what the tests ask about processes, at the moments at which these end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.processes import is_running


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
