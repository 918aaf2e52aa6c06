import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_s_python_can_be_typed_in_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 1: 2 workers" in done.stdout


def test_the_readme_names_only_files_that_exist():
    named = re.findall(r"`([\w./-]+(?:/|\.md)|LICENSE)`", README.read_text())
    assert named
    missing = [name for name in named if not (README.parent / name).exists()]
    assert missing == []
