"""TensorFlow is an optional extra: other parts work without it, and the Keras estimator says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

BLOCKED = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

OF_TORCH = "import spark_elastic, spark_elastic.torch, spark_elastic.ml.torch.train, spark_elastic.ml.torch.dry_run"


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)


def test_torch_estimator_does_not_import_tensorflow() -> None:
    done = run(
        f"import sys\n{OF_TORCH}\n"
        "spark_elastic.ElasticTorchEstimator(epochs=2); spark_elastic.ElasticTorchModel(); spark_elastic.run\n"
        "from spark_elastic import ElasticKerasEstimator, ElasticKerasModel\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("use", ["spark_elastic.ElasticKerasModel()", "import spark_elastic.tensorflow as hvd"])
def test_use_without_tensorflow_says_what_to_install(use: str) -> None:
    done = run(BLOCKED + f"import spark_elastic\n{use}")
    assert "extra [tensorflow], on the executors too" in done.stderr


@pytest.mark.nightly
def test_keras_on_another_backend_is_refused() -> None:
    pytest.importorskip("tensorflow")
    done = run("import spark_elastic\nspark_elastic.ElasticKerasEstimator()", KERAS_BACKEND="torch")
    assert "Keras runs on torch here; set KERAS_BACKEND=tensorflow" in done.stderr
