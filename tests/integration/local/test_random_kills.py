"""Loops of users, seeded, whose workers kill themselves at random moments: the end is that of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.local.random_kills import loop_of, train

pytestmark = pytest.mark.nightly

PREIMPORT = ("torch",)


def undisturbed(seed: int) -> str:
    """What the loop comes to in one process that nobody kills."""
    program = f"from tests.integration.local.random_kills import train; print(train({seed}, None, 0, 0.0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def killed(start_job, folder, seed: int, kills: int, pause_s: float) -> int:
    """Run the job of this seed; returns how many workers were killed."""
    job = start_job(
        train,
        (seed, str(folder), kills, pause_s),
        num_proc=3,
        min_num_proc=1,
        max_num_proc=3,
        preimport=PREIMPORT,
        cooldown_range=(0.05, 0.2),
        start_timeout=200,
        crash_limit=None,  # kills come faster than some loops commit
    )
    results = job.result(500)
    assert {str(result) for result in results} == {undisturbed(seed)}, loop_of(seed)
    assert not list(folder.glob("diverged-*"))
    return len(list(folder.glob("kill-*")))


def test_random_kills_leave_no_trace(start_job, tmp_path):
    assert killed(start_job, tmp_path, seed=1, kills=8, pause_s=0.01) > 0
