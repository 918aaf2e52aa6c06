import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).parent / "horovod_scripts"


def command(script, *args, workers=2, options=()):
    run = [sys.executable, "-m", "spark_elastic", "--master", f"local[{workers}]", "-np", str(workers), *options]
    return [*run, str(SCRIPTS / script), *args]


def run(script, *args, cwd, **more):
    done = subprocess.run(command(script, *args, **more), cwd=cwd, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "args", "expected"),
    [
        ("elastic_classifier.py", ["--epochs", "3"], r"size 2 loss 0\.\d+ accuracy 0\.[89]"),
        ("elastic_classifier.py", ["--epochs", "1", "--fp16-allreduce"], r"size 2 loss"),
        ("elastic_throughput.py", [], r"size 2 iterations 5 steps/s \d+"),
        ("plain_classifier.py", ["--gradient-predivide-factor", "2.0"], r"size 2 accuracy 0\.9\d+ same weights True"),
        ("plain_classifier.py", ["--clip", "1.0"], r"size 2 accuracy 0\.\d+ same weights True"),
        ("plain_throughput.py", ["--fp16-allreduce"], r"size 2 iterations 3 steps/s \d+"),
    ],
)
def test_a_script_in_horovod_s_manner_runs_unchanged(script, args, expected, tmp_path):
    assert re.search(expected, run(script, *args, cwd=tmp_path))


def test_a_script_resumes_from_the_checkpoint_that_rank_0_finds(tmp_path):
    checkpoint = ["--checkpoint-format", str(tmp_path / "at-{epoch}.pt")]
    first = run("elastic_residual.py", "--epochs", "2", *checkpoint, cwd=tmp_path)
    assert "done after epoch 2, from 0" in first
    second = run("elastic_residual.py", "--epochs", "3", *checkpoint, cwd=tmp_path)
    assert "done after epoch 3, from 2" in second
    assert "epoch 3 size 2" in second
    assert "epoch 2 size 2" not in second


def kill_a_worker_when(line, process, killed):
    """Once the program has printed a line like this, SIGKILL the newest of its workers."""
    for shown in process.stdout:
        killed["output"] += shown
        if "pid" not in killed and re.search(line, shown):
            workers = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if "spark_elastic.task.worker" in child.cmdline()
            ]
            victim = max(workers, key=lambda child: child.create_time())
            killed["pid"] = victim.pid
            os.kill(victim.pid, signal.SIGKILL)


def test_a_script_goes_on_when_one_of_its_workers_is_killed(tmp_path):
    elastic = ["--min-np", "1"]
    words = command("elastic_residual.py", "--epochs", "40", workers=3, options=elastic)
    killed = {"output": ""}
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watching = threading.Thread(target=kill_a_worker_when, args=(r"epoch 5 size 3", process, killed))
        watching.start()
        try:
            code = process.wait(180)
        finally:
            process.kill()
            watching.join()
    assert code == 0, killed["output"]
    assert "pid" in killed
    assert re.search(r"epoch \d+ size 2", killed["output"])
    epochs = [int(number) for number in re.findall(r"<stdout>:epoch (\d+) size", killed["output"])]
    assert sorted(set(epochs)) == list(range(1, 41))
