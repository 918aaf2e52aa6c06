"""The inputs and outputs of a Keras model as flat lists, whatever structure the model has; building unbuilt models.

Inputs and outputs are in the order of `model.inputs` and `model.outputs`; those of a dict in the order of their names.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError
from spark_elastic.ml.keras.serialization import architecture, check_config, custom_names, custom_objects_of

_MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def inputs_of(model: Any, flat: Sequence[Any]) -> Any:
    """Return the argument of a call of the model: one tensor, or all in the list or dict that the model declares."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict) and len(struct) == len(flat):
        return dict(zip(sorted(struct), flat, strict=True))
    return flat[0] if len(flat) == 1 else list(flat)


def outputs_of(returned: Any) -> list[Any]:
    """Return all outputs that a model returned, as a list."""
    return list(keras.tree.flatten(returned))


def input_names(model: Any) -> list[str] | None:
    """Return the name of each input; None if the model declares none, as subclasses of Model."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict):
        return sorted(struct)
    inputs = getattr(model, "inputs", None)
    return None if inputs is None else [str(each.name) for each in inputs]


def output_names(model: Any) -> list[str] | None:
    """Return the name of each output, as dicts of losses and metrics use them; None if unknown before a call."""
    struct = getattr(model, "_outputs_struct", None)
    if isinstance(struct, dict):
        return sorted(struct)
    names = getattr(model, "output_names", None)
    if names is None:
        outputs = getattr(model, "outputs", None)
        return None if outputs is None else [str(each._keras_history[0].name) for each in outputs]
    return [str(name) for name in names]


def check_kept(model: Any, at: int, name: str, values: Any) -> None:
    """Refuse integers that the type of the model's input cannot hold; Keras would cast them silently.

    Args:
        model: the model.
        at: the number of the input.
        name: the name of the values, for the error.
        values: an array.

    Raises:
        DataError: an integer is too large for the type.
    """
    if values.dtype.kind not in "iu" or not values.size:
        return
    inputs = getattr(model, "inputs", None) or []
    known = str(inputs[at].dtype) if at < len(inputs) else ""
    if known in _MANTISSA:
        high = 2 << _MANTISSA[known]
        low = -high
    elif known.startswith(("int", "uint")) and not np.can_cast(values.dtype, known):
        low, high = int(np.iinfo(known).min), int(np.iinfo(known).max)
    else:
        return
    if int(values.min()) < low or int(values.max()) > high:
        wrong = values[(values < low) | (values > high)]
        raise DataError(
            f"{name} holds {wrong.reshape(-1)[0]}, and the model's input {inputs[at].name} is of type {known}, which "
            f"keeps integers up to {high:,} as they are; make it keras.Input(..., dtype='int64')"
        )


def build_for(
    model: Any, inputs: Sequence[TensorField], seed: int, custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """Return a built copy of an unbuilt model, made by calling it with rows of zeros.

    Args:
        model: the model, which stays unbuilt.
        inputs: the fields of the dataset that are the inputs.
        seed: the seed of the weights; the same seed gives the same weights.
        custom_objects: classes and functions by the names in the configuration.

    Raises:
        InvalidSettingsError: the model cannot be called with such rows, or their shape is not known.
        NotPicklableError: the model cannot be copied.
    """
    check_config(model, NotPicklableError)
    for field in inputs:
        if field.kind not in (Kind.DENSE, Kind.SPARSE):
            raise InvalidSettingsError(
                f"the model is not built, and rows of {field.name} ({'+'.join(field.columns)}) have no fixed shape: "
                "build it first, by calling it on an array"
            )
    config = architecture(model)
    objects = custom_objects_of(model, custom_names(model, config), custom_objects)
    with _seeded(seed):
        copied = keras.saving.deserialize_keras_object(config, custom_objects=objects, safe_mode=False)
        rows = [np.zeros((1, *field.shape), field.dtype) for field in inputs]
        try:
            copied(inputs_of(copied, rows))
        except Exception as error:
            shapes = ", ".join(f"{field.name} {field.dtype} {[1, *field.shape]}" for field in inputs)
            raise InvalidSettingsError(
                f"the model is not built, and cannot be built for rows of these columns ({shapes}): {error}"
            ) from error
    return copied


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's generator, from which initializers without a seed draw one."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
