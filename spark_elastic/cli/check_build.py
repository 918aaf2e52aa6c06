"""``spark-elastic --check-build``: what is installed here, and what is missing to run."""

from __future__ import annotations

import importlib
import platform
from importlib import metadata

from spark_elastic.driver.preflight import check_java
from spark_elastic.errors import JavaNotFoundError


def check_build() -> tuple[str, bool]:
    """A report for people, and whether a job could be run from here."""
    lines = [f"Python {platform.python_version()}"]
    usable = True

    torch = _version("torch")
    if torch is None:
        usable = False
        lines.append("[ ] PyTorch: not installed; pip install torch")
    else:
        gloo, cuda = _torch_features()
        usable = usable and gloo
        lines.append(f"[{_mark(gloo)}] PyTorch {torch}" + ("" if gloo else ": built without Gloo, which is needed"))
        lines.append(f"[{_mark(cuda)}] GPUs that PyTorch can use here")

    spark = _version("pyspark")
    usable = usable and spark is not None
    missing = "not installed; pip install 'spark-elastic[spark]', or run under the cluster's own spark-submit"
    lines.append(f"[{_mark(spark is not None)}] PySpark {spark or ': ' + missing}")

    try:
        lines.append(f"[X] Java: {check_java()}")
    except JavaNotFoundError as error:
        usable = False
        lines.append(f"[ ] Java: {error}")

    keras = _version("tensorflow") or _version("tensorflow-cpu")
    lines.append(f"[{_mark(keras is not None)}] TensorFlow {keras or '(optional)'}")
    return "\n".join(lines), usable


def _mark(present: bool) -> str:
    return "X" if present else " "


def _torch_features() -> tuple[bool, bool]:
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    gloo = distributed.is_available() and distributed.is_gloo_available()
    return bool(gloo), bool(torch.cuda.is_available())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
