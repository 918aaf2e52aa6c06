"""``spark-elastic --check-build``: what is installed here, and what is missing to run."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from importlib import metadata


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

    java = _java()
    usable = usable and java is not None
    lines.append(
        f"[{_mark(java is not None)}] Java: {java or 'not found; install version 17 or newer, or set JAVA_HOME'}"
    )

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


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        return None
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(told.splitlines()), None)
