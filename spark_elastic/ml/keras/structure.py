"""What a Keras model is called with and returns: flat lists here, whatever structure it has there.

Inputs and outputs are in the order of `model.inputs` and `model.outputs`; of a dict, that is the order of the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from spark_elastic.errors import DataError

_MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def inputs_of(model: Any, flat: Sequence[Any]) -> Any:
    """What to call the model with: the tensor alone, or all in the list or dict that the model was made with."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict) and len(struct) == len(flat):
        return dict(zip(sorted(struct), flat, strict=True))
    return flat[0] if len(flat) == 1 else list(flat)


def check_kept(model: Any, at: int, name: str, values: Any) -> None:
    """Refuse integers that become others in the type of the model's input, which Keras casts to without a word.

    at: number of the input. values: an array.
    Raises: DataError
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


def outputs_of(returned: Any) -> list[Any]:
    """All that a model has returned, in a list."""
    return list(keras.tree.flatten(returned))


def input_names(model: Any) -> list[str] | None:
    """By input; None: it takes what it is given, as subclasses of Model do."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict):
        return sorted(struct)
    inputs = getattr(model, "inputs", None)
    return None if inputs is None else [str(each.name) for each in inputs]


def output_names(model: Any) -> list[str] | None:
    """By output, as losses and metrics in a dict name them; None: nothing is known before it is called."""
    struct = getattr(model, "_outputs_struct", None)
    if isinstance(struct, dict):
        return sorted(struct)
    names = getattr(model, "output_names", None)
    if names is None:
        outputs = getattr(model, "outputs", None)
        return None if outputs is None else [str(each._keras_history[0].name) for each in outputs]
    return [str(name) for name in names]
