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


ON_SPARK = ["--master", "local[{workers}]"]
LOCALLY = ["--launcher", "local"]


def command(script, *args, workers=2, options=ON_SPARK):
    options = [word.format(workers=workers) for word in options]
    return [sys.executable, "-m", "spark_elastic", "-np", str(workers), *options, str(SCRIPTS / script), *args]


def finish(words, cwd):
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(script, *args, cwd, **more):
    return finish(command(script, *args, **more), cwd)


@pytest.mark.nightly
def test_a_script_in_horovod_s_manner_runs_unchanged(tmp_path):
    assert re.search(r"size 2 accuracy 0\.[89]\d* same True", run("tensorflow_tape.py", cwd=tmp_path))


@pytest.mark.nightly
def test_a_script_resumes_from_the_checkpoint_that_rank_0_finds(tmp_path):
    checkpoint = ["--checkpoint-format", str(tmp_path / "at-{epoch}.pt")]
    first = run("elastic_residual.py", "--epochs", "2", *checkpoint, options=LOCALLY, cwd=tmp_path)
    assert "done after epoch 2, from 0" in first
    second = run("elastic_residual.py", "--epochs", "3", *checkpoint, options=LOCALLY, cwd=tmp_path)
    assert "done after epoch 3, from 2" in second
    assert "epoch 3 size 2" in second
    assert "epoch 2 size 2" not in second


def is_worker(process):
    """Return True for a worker, which has no children; the fork server and its keepers have."""
    try:
        is_ours = {"spark_elastic.task.main", "spark_elastic.task.fork_server"} & {*process.cmdline()}
        return bool(is_ours) and not process.children()
    except psutil.Error:  # it has just ended
        return False


def kill_a_worker_when(line, process, killed):
    """Once the program has printed a line like this, SIGKILL the newest of its workers."""
    for shown in process.stdout:
        killed["output"] += shown
        if "pid" not in killed and re.search(line, shown):
            workers = [child for child in psutil.Process(process.pid).children(recursive=True) if is_worker(child)]
            victim = max(workers, key=lambda child: child.create_time())
            killed["pid"] = victim.pid
            os.kill(victim.pid, signal.SIGKILL)


def output_with_a_kill(words, line, tmp_path):
    """What a program prints of whose workers one is killed when it has printed such a line."""
    killed = {"output": ""}
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watching = threading.Thread(target=kill_a_worker_when, args=(line, process, killed))
        watching.start()
        try:
            code = process.wait(180)
        finally:
            process.kill()
            watching.join()
    assert code == 0, killed["output"]
    assert "pid" in killed
    return killed["output"]


def test_a_script_goes_on_when_one_of_its_workers_is_killed(tmp_path):
    words = command("elastic_residual.py", "--epochs", "40", workers=3, options=[*ON_SPARK, "--min-np", "1"])
    output = output_with_a_kill(words, r"epoch 5 size 3", tmp_path)
    assert re.search(r"epoch \d+ size 2", output)
    epochs = [int(number) for number in re.findall(r"<stdout>:epoch (\d+) size", output)]
    assert sorted(set(epochs)) == list(range(1, 41))


@pytest.mark.nightly
def test_fit_with_horovod_s_callbacks_goes_on_when_a_worker_is_killed(tmp_path):
    words = command("keras_fit.py", workers=3, options=[*ON_SPARK, "--min-np", "1"])
    output = output_with_a_kill(words, r"epoch 2 size 3", tmp_path)
    assert re.search(r"epochs 12 accuracy 0\.[89]\d* same True", output), output
    assert re.search(r"epoch \d+ size 2", output)
    epochs = [int(number) for number in re.findall(r"<stdout>:epoch (\d+) size", output)]
    assert epochs == sorted(epochs)
    assert sorted(set(epochs)) == list(range(1, 13))
