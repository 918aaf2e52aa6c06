import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import GONE_S
from tests.nightly import by_night

CLI = [sys.executable, "-m", "spark_elastic"]
LOCAL = [*CLI, "--launcher", "local"]


@pytest.fixture
def script(tmp_path):
    def write(source, **modules):
        for name, text in {"train": source, **modules}.items():
            (tmp_path / f"{name}.py").write_text(text)
        return str(tmp_path / "train.py")

    return write


def run(words, cwd):
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_a_script_that_raises_ends_with_its_own_traceback(script, tmp_path):
    done = run([*LOCAL, "-np", "1", script("def f():\n    return 1 / 0\n\nf()\n")], tmp_path)
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex("spark-elastic: train.py:") :]
    assert "raised ZeroDivisionError: division by zero" in message
    assert 'train.py", line 2, in f' in message
    assert "    return 1 / 0" in message


def test_under_spark_submit_the_submitted_settings_win(script, tmp_path):
    path = script("import sys, helper\nprint('runs', helper.NAME, sys.argv[1:])", helper="NAME = 'with its helper'")
    submit = shutil.which("spark-submit", path=os.path.dirname(sys.executable))
    file = run([*CLI, "--submit-file"], tmp_path).stdout.strip()
    words = [submit, "--master", "local[2]", "--conf", "spark.task.cpus=1", file]
    words += ["--master", "local[7]", "--output-filename", "out", "-np", "2", path, "--lr", "1"]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--master local[7] is ignored: spark-submit chose local[2]" in done.stdout  # spark-submit merges the two
    assert done.stdout.count("runs with its helper ['--lr', '1']") == 2
    files = sorted(str(path.relative_to(tmp_path)) for path in Path(tmp_path, "out").rglob("stdout"))
    assert len(files) == 2


@pytest.mark.parametrize("number", by_night([signal.SIGINT, signal.SIGTERM], but=[signal.SIGTERM]))
def test_an_interrupted_command_leaves_no_process_behind(script, tmp_path, number):
    path = script("import time\nprint('up', flush=True)\ntime.sleep(600)")
    words = [*LOCAL, "-np", "2", path]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            seen = 0
            for line in process.stdout:
                seen += ":up" in line
                if seen == 2:
                    break
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 4  # two agents with a worker each
            process.send_signal(number)
            assert process.wait(60) == 130
            _, alive = psutil.wait_procs(family, timeout=GONE_S)
            assert alive == []
        finally:
            process.kill()
