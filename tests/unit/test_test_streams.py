"""`make test` runs two pytests beside each other: nothing that either says is lost, and either can fail the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"

# the two wait for each other, so they do run at the same time
MEETS = """
import pathlib, time, pytest
here = pathlib.Path(__file__).parent
def test_meets_the_other():
    (here / "here").touch()
    until = time.monotonic() + 60
    while not (here.parent / "{other}" / "here").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
"""
FAILS = "def test_fails():\n    assert 'what it found' == 'what it wanted'\n"


def run(folder: Path, fails: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").touch()
    for name, other in (("one", "two"), ("two", "one")):
        (folder / name).mkdir()
        (folder / name / f"test_{name}.py").write_text(MEETS.format(other=other) + FAILS * (name == fails))
    words = [sys.executable, SCRIPT, f"first={folder / 'one'}", f"second={folder / 'two'}"]
    environment = {**os.environ, "PYTEST_ADDOPTS": "-p no:cacheprovider", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


def test_both_streams_are_shown_and_summed_up(tmp_path):
    done = run(tmp_path, fails="")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert any(line.startswith("first       | one/test_one.py .") for line in lines)
    assert any(line.startswith("second      | two/test_two.py .") for line in lines)
    assert lines[-2] == "first ended with 0, second ended with 0"
    assert " 2 passed in " in lines[-1]


def test_either_stream_fails_the_whole_and_its_report_stands_in_one_piece(tmp_path):
    for number, fails in enumerate(("one", "two")):
        folder = tmp_path / fails
        folder.mkdir()
        done = run(folder, fails)
        assert done.returncode == 1, done.stdout
        report = done.stdout.partition(f"---- {('first', 'second')[number]} ----\n")[2]
        of_its_own, found, _ = report.partition(" 1 failed, 1 passed in ")
        assert found
        assert "what it wanted" in of_its_own
        assert not any(line.startswith(("first ", "second ")) for line in of_its_own.splitlines())
        assert " 1 failed, 2 passed in " in report.splitlines()[-1]
