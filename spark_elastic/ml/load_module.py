"""`load_module`: the framework's own model of a saved one, in a process without Spark."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.saved_folder import saved_folder
from spark_elastic.ml.saved_stage import damage_named, read_stage
from spark_elastic.runs.trust import granted, is_trusted, trusted_files

_TORCH = "spark_elastic.ml.torch.model.ElasticTorchModel"
_KERAS = "spark_elastic.ml.keras.model.ElasticKerasModel"


def load_module(
    path: str | Path, *, trusted: bool = False, module: Any = None, custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """Load the module or Keras model of a saved fitted model. Needs neither pyspark nor Java.

    Args:
        path: what `save` was given: a folder of this machine, or a URI that `Store` opens (s3://, gs://, hdfs://).
        trusted: run code that the files name; needed for classes and functions of your own.
        module: a PyTorch module of the same architecture, which is given the saved weights; no trust is needed.
        custom_objects: your classes and functions of a Keras model by their names; no trust is needed for them.

    Returns:
        The `torch.nn.Module`, on the CPU and in eval mode, or the `keras.Model`, not compiled.

    Raises:
        CheckpointError: the path holds no such model, or a damaged one, or one that needs trust.
        InvalidSettingsError: `module` or `custom_objects` is given for a model of the other framework.
    """
    name = os.fspath(path)
    source = saved_folder(None, name)
    stage = read_stage(source, name, _TORCH, _KERAS)
    is_torch = stage.kind == _TORCH
    if (custom_objects if is_torch else module) is not None:
        given, framework = ("custom_objects", "PyTorch") if is_torch else ("module", "Keras")
        raise InvalidSettingsError(f"{name} holds a {framework} model, which takes no {given}; leave it out")
    if not is_torch:
        from spark_elastic.ml.keras.tensorflow_setup import check_backend

        check_backend("load_module")
    saved: Any = importlib.import_module(f"spark_elastic.ml.{'torch' if is_torch else 'keras'}.saved_model")
    instead = {"architecture": module} if module is not None else {}
    if custom_objects is not None:
        instead = {"custom_objects": dict(custom_objects)}
    trusted = trusted or is_trusted() or granted(name, source.qualified)
    with damage_named(name):
        instead = {**saved.present(stage.facts), **instead}
    objects = stage.values(saved.codec, trusted, instead, settings=False)
    with trusted_files(trusted), damage_named(name):
        return saved.native_of(stage.facts, stage.files, objects)
