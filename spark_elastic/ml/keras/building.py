"""Models that are not built yet: a copy of one with the weights that it gets for the columns of a set."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import keras
import numpy as np

from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.errors import InvalidSettingsError, NotPicklableError
from spark_elastic.ml.keras import archives
from spark_elastic.ml.keras.custom_objects import custom_objects_of, not_described, own_names
from spark_elastic.ml.keras.structure import inputs_of

# Keras objects as plain values that are the same in another process, where `dense` may be called `dense_3`.

_PASSING = ("shared_object_id", "compile_config", "build_config", "registered_name")


def plainly(value: Any) -> Any:
    """The configurations of Keras objects in place of them, with the names of layers counted."""
    if isinstance(value, (list, tuple)):
        return [plainly(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plainly(each) for name, each in value.items()}
    if isinstance(value, (str, type, FunctionType)) or not hasattr(value, "get_config"):
        return value
    names: dict[str, str] = {}
    kind = type(value)
    own = {} if kind.__module__.partition(".")[0] == "keras" else _own_attributes(value)
    is_model = isinstance(value, keras.Model)
    config = archives.architecture(value) if is_model else keras.saving.serialize_keras_object(value)
    return _counted(config, names) | own


def _counted(node: Any, names: dict[str, str]) -> Any:
    """Names in the order in which they come first; whoever refers to them later gets the same number."""
    if isinstance(node, Mapping):
        if isinstance(node.get("name"), str):
            names.setdefault(node["name"], f"#{len(names)}")
        return {name: _counted(each, names) for name, each in node.items() if name not in _PASSING}
    if isinstance(node, (list, tuple)):
        return [_counted(each, names) for each in node]
    return names.get(node, node) if isinstance(node, str) else node


def _own_attributes(value: Any) -> dict[str, Any]:
    """What a loss of the user's own has, whose configuration may leave it out."""
    if not isinstance(value, keras.losses.Loss):
        return {}
    plain = (bool, int, float, str, type(None), FunctionType)
    return {name: each for name, each in vars(value).items() if name[0] != "_" and isinstance(each, plain)}


def built_for(
    model: Any, inputs: Sequence[TensorField], seed: int, custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """A copy of `model`, which stays unbuilt, called with rows of zeros. The same weights for the same seed.

    Raises:
        InvalidSettingsError: it cannot be called with such rows, or their shape is not known.
        NotPicklableError: it cannot be copied.
    """
    if (kind := not_described(model)) is not None:
        raise NotPicklableError(
            f"{kind}.get_config() leaves out arguments of {kind}.__init__; it has to return all of them"
        )
    for field in inputs:
        if field.kind not in (Kind.DENSE, Kind.SPARSE):
            raise InvalidSettingsError(
                f"the model is not built, and rows of {field.name} ({'+'.join(field.columns)}) have no shape: build it "
                "first, by calling it on an array"
            )
    config = archives.architecture(model)
    objects = custom_objects_of(model, own_names(model, config), custom_objects)
    with _seeded(seed):
        copied = keras.saving.deserialize_keras_object(config, custom_objects=objects, safe_mode=False)
        rows = [np.zeros((1, *field.shape), field.dtype) for field in inputs]
        try:
            copied(inputs_of(copied, rows))
        except Exception as error:
            shapes = ", ".join(f"{field.name} {field.dtype} {[1, *field.shape]}" for field in inputs)
            raise InvalidSettingsError(
                f"the model is not built, and cannot be for rows of these columns ({shapes}): {error}"
            ) from error
    return copied


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initializers without a seed of their own draw one from Python's generator."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
