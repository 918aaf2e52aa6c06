"""TensorFlow and torch in one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spark_elastic.task.worker_process import worker_environment
from spark_elastic.wire.messages import LaunchSpec, modules_of

BOTH = """
import numpy as np, tensorflow as tf, torch
import spark_elastic.tensorflow as hvd
hvd.init()
a = np.arange(6, dtype="f4").reshape(2, 3)
assert np.allclose(tf.linalg.matmul(a, a.T).numpy(), (torch.from_numpy(a) @ torch.from_numpy(a).T).numpy())
assert hvd.allreduce(tf.constant([1.0])).numpy() == 1.0
import os
assert torch.get_num_threads() == 1, torch.get_num_threads()
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.nightly
def test_both_work_in_one_process():
    env = worker_environment(_spec(), {}, [], cores=1, accelerators=())
    threads = {name: env[name] for name in env if "THREADS" in name}
    assert threads == {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **threads}
    done = subprocess.run([sys.executable, "-c", BOTH], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    few, many = int(done.stdout), os.cpu_count() or 1
    assert few < 40 + many  # allows other threads of the libraries; a pool per core would exceed it on a large host


def _spec(**others) -> LaunchSpec:
    return LaunchSpec("job", (("127.0.0.1", 1),), b"key", b"", 1.0, "", **others)


def test_worker_has_one_thread_per_core_of_its_task_unless_the_user_sets_it():
    env = worker_environment(_spec(env={"TF_NUM_INTRAOP_THREADS": "3"}), {"OMP_NUM_THREADS": "2"}, [], 4, ())
    assert (env["TF_NUM_INTRAOP_THREADS"], env["OMP_NUM_THREADS"], env["TF_NUM_INTEROP_THREADS"]) == ("3", "2", "4")


def test_worker_imports_the_frameworks_that_its_function_names():
    assert "tensorflow" in modules_of(b"... spark_elastic.tensorflow ...")
    assert "keras" in modules_of(b"... spark_elastic.keras ...")
    assert "tensorflow" not in modules_of(b"... spark_elastic.keras ...")
    assert modules_of(b"... spark_elastic.torch ...") == ("torch", "spark_elastic.torch")
    assert "torch._dynamo" in modules_of(b"... spark_elastic.torch ... compile ...")
    assert "spark_elastic.ml.torch.train" in modules_of(b"... spark_elastic.ml.torch.train ... train ...")
