"""What a Keras model is called with and returns: flat lists here, whatever structure it has there.

Inputs and outputs are in the order of `model.inputs` and `model.outputs`; of a dict, that is the order of the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras


def inputs_of(model: Any, flat: Sequence[Any]) -> Any:
    """What to call the model with: the tensor alone, or all in the list or dict that the model was made with."""
    struct = getattr(model, "_inputs_struct", None)
    if isinstance(struct, dict) and len(struct) == len(flat):
        return dict(zip(sorted(struct), flat, strict=True))
    return flat[0] if len(flat) == 1 else list(flat)


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
