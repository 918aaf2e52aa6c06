"""Describe settings as short plain values, for trackers and logs: no addresses of objects, no credentials."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import re
from collections.abc import Mapping
from typing import Any

from spark_elastic.redaction import ALL_SECRET, MARK, is_secret, redacted

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST = 6000  # characters of a description: the most that MLflow takes as a parameter


def describe_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are set (not None), each described by `describe`, without credentials."""
    return {name: describe_setting(name, value) for name, value in settings.items() if value is not None}


def describe_setting(name: str, value: Any) -> Any:
    """Return a setting's value as a number, a bool or a short text."""
    if name in ALL_SECRET and isinstance(value, Mapping):
        return _cut(", ".join(sorted(map(str, value))))
    return MARK if is_secret(name, value) else describe(value)


def describe(value: Any) -> Any:
    """Return a value as a number, a bool or a short text that does not change from run to run."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, numbers.Real):
        return value.item() if hasattr(value, "item") else value
    if isinstance(value, os.PathLike):
        return _cut(str(value))
    if isinstance(value, Mapping):
        return _cut(str({key: describe_setting(str(key), one) for key, one in value.items()}))
    if isinstance(value, (list, tuple, set, frozenset)):
        return _cut(str([describe(one) for one in value]))
    return _cut(_describe_object(value))


def _describe_object(value: Any) -> str:
    if isinstance(value, functools.partial):
        given = [*(str(describe(one)) for one in value.args)]
        given += [f"{name}={describe(one)}" for name, one in value.keywords.items()]
        return f"{_describe_object(value.func)}({', '.join(given)})"
    if isinstance(value, type) or inspect.isroutine(value):
        return _name_of(value)
    config = getattr(value, "get_config", None)
    if callable(config) and type(value).__module__.startswith("keras."):
        return _describe_keras(value, config)
    try:
        text = repr(value)
    except Exception:  # an object of the user's own
        text = " at 0x0"
    if _ADDRESS.search(text) or len(text) > _LONGEST:
        return _name_of(type(value))
    return text


def _describe_keras(value: Any, config: Any) -> str:
    """Describe an optimizer, loss or metric of Keras by its class and plain settings; a model by its layers."""
    layers = getattr(value, "layers", None)
    if layers is not None:
        return f"{type(value).__name__}({', '.join(type(layer).__name__ for layer in layers)})"
    try:
        given = {key: one for key, one in config().items() if key != "name"}
        plain = {key: one for key, one in given.items() if isinstance(one, (bool, int, float, str))}
    except Exception:
        plain = {}
    return f"{type(value).__name__}({', '.join(f'{key}={one!r}' for key, one in plain.items())})"


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if value.__module__ != "builtins" else str(value.__qualname__)


def _cut(text: str) -> str:
    text = redacted(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
