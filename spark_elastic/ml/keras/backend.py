"""Whether Keras is there, and runs on TensorFlow: asked before anything of either is used."""

from __future__ import annotations

import os
import sys

from spark_elastic.errors import InvalidSettingsError, MissingExtraError

NEEDED = "tensorflow"
ENV = "KERAS_BACKEND"


def check_backend(what: str) -> None:
    """what: who needs it, for the error.

    Raises: MissingExtraError: Keras or TensorFlow is not installed. InvalidSettingsError: Keras runs on something else.
    """
    try:
        import keras
        import tensorflow  # noqa: F401  (on another backend Keras does without)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] not in ("keras", "tensorflow"):
            raise
        raise MissingExtraError(what=what, package=str(error.name), extra="tensorflow") from error
    if keras.__version__.startswith("2."):
        raise InvalidSettingsError(f"{what} needs Keras 3, and Keras {keras.__version__} is installed")
    if keras.backend.backend() != NEEDED:
        raise InvalidSettingsError(
            f"{what} trains Keras models on TensorFlow, and Keras runs on {keras.backend.backend()} here; set "
            f"{ENV}={NEEDED} before keras is imported for the first time"
        )


def prefer_backend() -> None:
    """For processes of our own: TensorFlow, if nobody has said or done otherwise."""
    if "keras" not in sys.modules:
        os.environ.setdefault(ENV, NEEDED)
