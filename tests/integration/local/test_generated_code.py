"""Workers leave no files of the code that TensorFlow generates, however they end."""

import os
import signal
from pathlib import Path

import pytest

from spark_elastic.errors import UserFunctionError

pytest.importorskip("tensorflow")
PREIMPORT = ("torch", "tensorflow", "keras")


def halve(folder, dies):
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

    marker = Path(folder, "dies")
    found = int(halvings(tf.constant(1024)))
    if dies and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not dies:
        wrong(found)
    return found


@pytest.mark.parametrize("dies", [True, False], ids=["killed", "raises"])
def test_workers_leave_no_code_that_tensorflow_has_generated(dies, start_job, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": ""}
    job = start_job(halve, (str(tmp_path), dies), num_proc=1, start_timeout=120, env=env, preimport=PREIMPORT)
    if dies:
        assert job.result(240) == [10]
    else:
        with pytest.raises(UserFunctionError, match='return number \\+ "a word"'):
            job.result(240)
    assert not list(temporary.rglob("*autograph*"))
