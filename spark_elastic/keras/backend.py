"""Check that Keras runs on TensorFlow or torch, before Keras is imported; `BACKEND` is the name of its backend."""

from __future__ import annotations

import json
import os
from pathlib import Path

from spark_elastic.errors import MissingExtraError, UsageError

SUPPORTED = ("tensorflow", "torch")


def _configured() -> str:
    """Return the backend that Keras would choose: from the environment first, then from its file."""
    if named := os.environ.get("KERAS_BACKEND"):
        return named
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def _checked() -> str:
    configured = _configured()
    if configured not in SUPPORTED:  # checked before the import of Keras, which fails if that backend is not installed
        raise _unsupported(f"is set to the {configured} backend")
    try:
        import keras
    except ImportError as error:
        package = error.name or "keras"
        raise MissingExtraError(what="spark_elastic.keras", package=package, extra="tensorflow") from error
    backend = str(keras.backend.backend())
    if backend not in SUPPORTED:
        raise _unsupported(f"runs on the {backend} backend")
    return backend


def _unsupported(state: str) -> UsageError:
    return UsageError(
        f"Keras {state} in this process, but spark_elastic.keras supports only TensorFlow and PyTorch; set "
        "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
    )


BACKEND = _checked()
"""The backend of Keras in this process: "tensorflow" or "torch"."""
