"""A short storm of `benchmarks/chaos.py` over processes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("loop", ["sampler", "torch"])
def test_a_short_storm_leaves_no_trace(loop: str, tmp_path: Path) -> None:
    storm = ["--on", "processes", "--loop", loop, "--seed", "3", "--faults", "6", "--gap", "0.3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *storm, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (one,) = json.loads((tmp_path / f"chaos-processes-{loop}.json").read_text())["raw"]["storms"]
    assert [fault["number"] for fault in one["faults"]] == [1, 2, 3, 4, 5, 6]
    assert one["worlds"] > 1
    assert one["problems"] == one["lost_steps"] == []
