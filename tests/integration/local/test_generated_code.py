"""Workers leave no files of the code that TensorFlow generates, however they end."""

import os
import signal
from pathlib import Path

import pytest

from spark_elastic.errors import UserFunctionError

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.nightly
PREIMPORT = ("torch", "tensorflow", "keras")


def halve(folder):
    import tensorflow as tf

    @tf.function
    def halvings(number):
        found = 0
        while number > 1:  # a loop of the graph once AutoGraph has generated code for it
            number //= 2
            found += 1
        return found

    @tf.function
    def wrong(number):
        return number + "a word"

    marker = Path(folder, "died")
    found = int(halvings(tf.constant(1024)))
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wrong(found)


def test_workers_that_are_killed_or_raise_leave_no_generated_code(start_job, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": ""}
    job = start_job(halve, (str(tmp_path),), num_proc=1, start_timeout=120, env=env, preimport=PREIMPORT)
    with pytest.raises(UserFunctionError, match='return number \\+ "a word"'):
        job.result(240)
    assert (tmp_path / "died").exists()
    assert not list(temporary.rglob("*autograph*"))
