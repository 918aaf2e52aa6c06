"""The `Codec` of the Keras estimators: settings in a file that can be loaded without trust.

Keras describes models, layers, optimizers, losses and metrics by configurations, and in its safe mode creates only its
own classes from them. So Keras's objects, plain values and this package's callbacks can be loaded without running code
that the file names. A value with a user's class or function cannot: it is pickled, and loading it needs trust.
"""

from __future__ import annotations

import io
import json
import zipfile
from types import FunctionType
from typing import Any

import keras
import numpy as np

from spark_elastic.errors import CheckpointError
from spark_elastic.keras.archives import archive_config, check_names_no_files
from spark_elastic.ml import callbacks as own_callbacks
from spark_elastic.ml.keras import pickling
from spark_elastic.ml.keras.compiling import build_optimizer, compiled_with, values_of
from spark_elastic.ml.keras.fidelity import adapters_of, undecayed
from spark_elastic.ml.keras.serialization import config_of, custom_names, model_from_archive, model_to_archive
from spark_elastic.runs import trust

SUFFIX = "zip"
_TREE = "objects.json"
_PLAIN = (bool, int, float, str, type(None))
_OWN = {
    each.__name__: each
    for each in vars(own_callbacks).values()
    if isinstance(each, type) and each.__module__ == own_callbacks.__name__
}


class _NeedsTrustError(Exception):
    """A value can be stored only as a pickle, whose loading needs trust."""


def dumps(value: Any) -> bytes | None:
    """Return the value as a file that `loads` accepts; None if it needs a pickle."""
    files: dict[str, bytes] = {}
    try:
        tree = _written(value, files)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_TREE, json.dumps(tree))
            for name, content in files.items():
                archive.writestr(name, content)
        loads(file.getvalue())
    except Exception:  # the caller pickles a value that cannot be written, or not be read again
        return None
    return file.getvalue()


def loads(file: bytes) -> Any:
    """Load what `dumps` has written. Raise CheckpointError if it is damaged, names other things, or Keras is unsafe."""
    trust.KERAS.check(keras.__version__)
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            return _read(json.loads(archive.read(_TREE)), archive)
    except CheckpointError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot be loaded without trust: {type(error).__name__}: {why}") from error


def pickled(value: Any) -> bytes:
    return pickling.dumps(value, compiled=True)


def _written(value: Any, files: dict[str, bytes]) -> Any:
    """Return the value as JSON: plain values and lists as they are, everything else as a dict of one entry."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return [_written(each, files) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_written(each, files) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_written(key, files), _written(each, files)] for key, each in value.items()]}
    if isinstance(value, keras.Model):
        file = model_to_archive(value)
        if adapters_of(value) or custom_names(value, archive_config(file)):
            raise _NeedsTrustError
        files[name := f"{len(files)}.keras"] = file
        arguments = compiled_with(value)
        return {
            "model": [name, _written(arguments, files), _written(values_of(getattr(value, "optimizer", None)), files)]
        }
    if isinstance(value, np.ndarray):
        array = io.BytesIO()
        np.save(array, value, allow_pickle=False)
        files[name := f"{len(files)}.npy"] = array.getvalue()
        return {"array": name}
    if _OWN.get(type(value).__name__) is type(value):
        return {"own": [type(value).__name__, _written(vars(value), files)]}
    home = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    if home.partition(".")[0] != "keras":
        raise _NeedsTrustError
    config = config_of(value)
    if undecayed(value, _NeedsTrustError) or custom_names(value, config):
        raise _NeedsTrustError
    return {"keras": config}


def _read(node: Any, archive: zipfile.ZipFile) -> Any:
    if isinstance(node, _PLAIN):
        return node
    if isinstance(node, list):
        return [_read(each, archive) for each in node]
    ((kind, value),) = node.items()
    if kind == "tuple":
        return tuple(_read(each, archive) for each in value)
    if kind == "dict":
        return {_read(key, archive): _read(each, archive) for key, each in value}
    if kind == "model":
        name, arguments, values = value
        model = model_from_archive(archive.read(name), safe=True)
        if arguments := _read(arguments, archive):
            model.compile(**arguments)
            if (values := _read(values, archive)) is not None:
                build_optimizer(model, values)
        return model
    if kind == "array":
        return np.load(io.BytesIO(archive.read(value)), allow_pickle=False)
    if kind == "own":
        name, attributes = value
        made: Any = object.__new__(_OWN[name])
        vars(made).update(_read(attributes, archive))
        return made
    if kind == "keras":
        check_names_no_files(value)
        return keras.saving.deserialize_keras_object(value, safe_mode=True)
    raise CheckpointError(f"the file holds {kind!r}, which this version does not know")
