"""Keras objects as plain values that are the same in another process, where `dense` may be called `dense_3`."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import keras

from spark_elastic.ml.keras import archives

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
