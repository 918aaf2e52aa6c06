"""TensorFlow and torch in one process, and the error if TensorFlow is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spark_elastic.task.worker_process import worker_environment
from spark_elastic.wire.messages import LaunchSpec, modules_of


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


BOTH = """
import {first}, {second}
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


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param("torch", "tensorflow", marks=pytest.mark.soak), ("tensorflow", "torch")]
)
def test_both_work_in_one_process_whichever_is_imported_first(first, second):
    env = worker_environment(_order(), {}, [], cores=1, accelerators=())
    threads = {name: env[name] for name in env if "THREADS" in name}
    assert threads == {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    done = python(BOTH.format(first=first, second=second), **threads)
    assert done.returncode == 0, done.stderr
    few, many = int(done.stdout), os.cpu_count() or 1
    assert few < 40 + many  # allows other threads of the libraries; a pool per core would exceed it on a large host


def _order(**others) -> LaunchSpec:
    return LaunchSpec("job", (("127.0.0.1", 1),), b"key", b"", 1.0, "", **others)


def test_worker_has_one_thread_per_core_of_its_task_unless_the_user_sets_it():
    env = worker_environment(_order(env={"TF_NUM_INTRAOP_THREADS": "3"}), {"OMP_NUM_THREADS": "2"}, [], 4, ())
    assert (env["TF_NUM_INTRAOP_THREADS"], env["OMP_NUM_THREADS"], env["TF_NUM_INTEROP_THREADS"]) == ("3", "2", "4")


def test_worker_imports_the_frameworks_that_its_function_names():
    assert "tensorflow" in modules_of(b"... spark_elastic.tensorflow ...")
    assert "keras" in modules_of(b"... spark_elastic.keras ...")
    assert "tensorflow" not in modules_of(b"... spark_elastic.keras ...")
    assert modules_of(b"... spark_elastic.torch ...") == ("torch", "spark_elastic.torch")
    assert "torch._dynamo" in modules_of(b"... spark_elastic.torch ... compile ...")
    assert "spark_elastic.ml.torch.training" in modules_of(b"... spark_elastic.ml.torch.training ... train ...")


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import spark_elastic, spark_elastic.torch
from spark_elastic import ElasticTorchEstimator
try:
    import spark_elastic.tensorflow
except ImportError as error:
    assert 'pip install "spark-elastic[tensorflow]"' in str(error), error
    print("said so")
"""


def test_without_tensorflow_torch_works_and_the_error_names_the_extra_to_install():
    done = python(BLOCKED)
    assert done.stdout == "said so\n", done.stderr
