import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_loses_a_worker_and_proves_that_nothing_else_was_lost():
    done = subprocess.run([sys.executable, DEMO], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ">>> kill -9" in done.stdout
    assert "steps lost, done twice  0, 0" in done.stdout
    assert "The training never noticed." in done.stdout
