"""A Keras model as the bytes of a `.keras` archive and back, without what it was compiled with."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from spark_elastic.errors import CheckpointError
from spark_elastic.ml import trust

_saving = threading.Lock()


def dumps(model: Any) -> bytes:
    """The model's architecture and weights. Raises: whatever Keras does for what has no config."""
    with tempfile.TemporaryDirectory(prefix="spark_elastic-keras-") as folder, _as_uncompiled(model):
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def loads(file: bytes, custom_objects: Mapping[str, Any] | None = None, *, safe: bool = False) -> Any:
    """The model, not compiled. safe: no code of the file is run, which Lambda layers have in them.

    Raises: whatever Keras does. CheckpointError: safe, and this version of Keras is not.
    """
    if safe:
        trust.KERAS.check(keras.__version__)
    with _on_disk(file) as path:
        return keras.saving.load_model(path, custom_objects=dict(custom_objects or {}), compile=False, safe_mode=safe)


def architecture(model: Any) -> Any:
    """The model's configuration, as `config_of` its archive."""
    with _as_uncompiled(model):
        return keras.saving.serialize_keras_object(model)


def config_of(file: bytes) -> Any:
    """The configuration in an archive. Raises: CheckpointError: it is none."""
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            return json.loads(archive.read("config.json"))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise CheckpointError(f"not a .keras archive: {error}") from error


@contextlib.contextmanager
def _on_disk(file: bytes) -> Iterator[Path]:
    """Keras reads archives from paths alone."""
    with tempfile.TemporaryDirectory(prefix="spark_elastic-keras-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(file)
        yield path


@contextlib.contextmanager
def _as_uncompiled(model: Any) -> Iterator[None]:
    """Losses and metrics, which need not have a config, stay out of the archive. One thread at a time: the fits of a
    CrossValidator have one model in common."""
    with _saving, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lambdas, which the caller knows about
        compiled = [each for each in model._flatten_layers() if vars(each).get("compiled")]
        for each in compiled:
            vars(each)["compiled"] = False
        try:
            yield
        finally:
            for each in compiled:
                vars(each)["compiled"] = True
