"""Which backend Keras runs on here: TensorFlow or torch, whose tensors can be reduced; told before it is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path

from spark_elastic.errors import MissingExtraError, UsageError

SUPPORTED = ("tensorflow", "torch")


def _configured() -> str:
    """What Keras would choose: the environment first, then its file."""
    named = os.environ.get("KERAS_BACKEND")
    if named:
        return named
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def _checked() -> str:
    configured = _configured()
    if configured not in SUPPORTED:  # before Keras is imported, which needs that backend to be installed
        raise UsageError(
            f"Keras is set to the {configured} backend here, and spark_elastic.keras reduces gradients of TensorFlow "
            "and of PyTorch; set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
        )
    try:
        import keras
    except ImportError as error:
        package = error.name or "keras"
        raise MissingExtraError(what="spark_elastic.keras", package=package, extra="tensorflow") from error
    backend = str(keras.backend.backend())
    if backend not in SUPPORTED:
        raise UsageError(
            f"Keras runs on the {backend} backend in this process, and spark_elastic.keras reduces gradients of "
            "TensorFlow and of PyTorch; set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
        )
    return backend


BACKEND = _checked()
"""tensorflow or torch."""
