"""The files of a saved Keras model, and the model in them. Imports nothing of Spark.

The architecture is a configuration, which runs no code; the user's classes that it names are separate. Instead of a
configuration that Keras cannot make, or that may leave something out, the function is saved that made the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from spark_elastic.data.manifest import names_in
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.keras import safe_objects as codec
from spark_elastic.ml.keras.model_function import KerasFunction
from spark_elastic.ml.keras.serialization import (
    architecture,
    custom_names,
    custom_objects_of,
    model_from_archive,
    model_to_archive,
    weights_to_bytes,
)
from spark_elastic.ml.saved_stage import SavedParts
from spark_elastic.runs.trust import TRUST, is_trusted

OBJECTS = "custom_objects"
FUNCTION = "model_function"
LAMBDA = "<lambda>"  # the name that `custom_names` gives to lambdas
_ARCHIVE, _WEIGHTS = "model.keras", "weights.npz"

__all__ = ["FUNCTION", "LAMBDA", "OBJECTS", "codec", "native_of", "parts_of", "present"]


def parts_of(
    model: Any, facts: Mapping[str, Any], custom_objects: Mapping[str, Any], made_by: KerasFunction | None
) -> SavedParts:
    """Return what to save of a model; `facts` are those of its fit, `custom_objects` those it was loaded with."""
    if made_by is not None and not _is_archivable(model, custom_objects):
        weights = {_WEIGHTS: weights_to_bytes(model)}
        return SavedParts({**facts, OBJECTS: []}, weights, {FUNCTION: replace(made_by, weights=b"")})
    names = custom_names(model, architecture(model))
    # the code of Lambda layers is in the archive itself
    own = [name for name in names if name != LAMBDA]
    return SavedParts(
        {**facts, OBJECTS: names},
        {_ARCHIVE: model_to_archive(model)},
        {OBJECTS: custom_objects_of(model, own, custom_objects)} if own else {},
        ["Lambda layers"] if LAMBDA in names else [],
    )


def _is_archivable(model: Any, known: Mapping[str, Any]) -> bool:
    """Return whether a model consists of classes and functions of Keras, registered ones and known ones alone."""
    try:
        names = custom_names(model, architecture(model))
    except Exception:  # of a class without a configuration, or of one that cannot be described
        return False
    return all(name in known or keras.saving.get_registered_object(name) is not None for name in names)


def present(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved objects if all of them are registered with Keras in this process."""
    found = {name: keras.saving.get_registered_object(name) for name in names_in(facts, OBJECTS) if name != LAMBDA}
    return {OBJECTS: found} if found and None not in found.values() else {}


def native_of(facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> Any:
    """Return the saved model, not compiled. Raises `CheckpointError` if it is damaged, or needs trust."""
    given, safe = objects.get(OBJECTS, {}), not is_trusted()
    if isinstance(function := objects.get(FUNCTION), KerasFunction) and _WEIGHTS in files:
        try:
            return replace(function, weights=files[_WEIGHTS]).load()
        except Exception as error:  # of the user's function
            raise CheckpointError(f"{_WEIGHTS} cannot be loaded into what {FUNCTION} makes: {error}") from error
    if _ARCHIVE not in files or not isinstance(given, dict):
        raise CheckpointError("the metadata of the saved model is damaged: it names no archive, or odd objects")
    names = names_in(facts, OBJECTS)
    if safe and LAMBDA in names:
        raise CheckpointError(f"{_ARCHIVE} has Lambda layers, which are code that loading it runs. {TRUST}")
    try:
        return model_from_archive(files[_ARCHIVE], given, safe=safe)
    except Exception as error:  # Keras raises errors of many classes
        why = str(error).partition("\n")[0]
        needed = [name for name in names if name not in given]
        hint = f" (it needs {', '.join(needed)})" if needed else ""
        raise CheckpointError(f"{_ARCHIVE} cannot be loaded: {type(error).__name__}: {why}{hint}") from error
