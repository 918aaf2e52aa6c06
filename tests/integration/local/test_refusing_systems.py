"""Jobs on systems that refuse what Linux usually gives: descriptors of processes, and the exit codes of children."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-m", "tests.integration.local.refusing_system_program"]


@pytest.mark.parametrize("how", ["seccomp", "SIGCHLD"])
def test_system_that_hides_ends_of_processes_trains(how: str, tmp_path: Path) -> None:
    done = subprocess.run([*PROGRAM, str(tmp_path), how], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["results"][0] == 150
    assert told["lost"] == ["killed by signal 9"]
    assert told["ignored"] == (how == "SIGCHLD")
