import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import spark_elastic

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


def test_the_readme_lists_every_setting_of_run():
    listed = set(re.findall(r"`(\w+)`", README.read_text().partition("## Settings of `run`")[2]))
    assert set(inspect.signature(spark_elastic.run).parameters) - {"fn", "args", "kwargs", "spark"} <= listed


def test_the_package_claims_only_the_frameworks_that_it_has():
    project = (README.parent / "pyproject.toml").read_text()
    claims = re.findall(r"^(?:description|keywords) = (.*)$", project, re.MULTILINE)
    said = " ".join([*claims, str(spark_elastic.__doc__)]).lower()
    for framework in ("torch", "tensorflow", "keras"):
        has = (README.parent / "spark_elastic" / framework).is_dir()
        assert has == (framework in said), framework
