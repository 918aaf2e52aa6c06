"""What is kept of a callback of Keras: the plain values and arrays among its attributes.

Everything else that it has (its model, files, functions) each process has of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_ATOMS = (bool, int, float, str, type(None))
_OWN = frozenset({"model", "_model", "params", "validation_data", "append", "append_header", "min_delta"})
"""Attributes that belong to the process: the training that it does, files that it has found, and a setting whose sign
Keras turns when it first looks up which way the monitored metric is better, which each process does for itself."""


class NotPlain(Exception):
    """A value that is not kept."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Attributes of a callback as they were. Not changed once it is made, so that it is copied by keeping it.

    begun: whether its `on_train_begin` was called before.
    """

    begun: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    @classmethod
    def of(cls, callback: Any, begun: bool) -> Kept:
        return cls(begun, plain_values(callback))

    def put_into(self, callback: Any) -> None:
        put_values(callback, self.values)

    # --- in files ---------------------------------------------------------------------------------

    def to_json(self, arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
        """For JSON. The arrays are put into `arrays`, by names that begin with the prefix."""

        def written(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                name = f"{prefix}{len(arrays)}"
                arrays[name] = value
                return {"array": name}
            if isinstance(value, dict):
                return {"dict": [[written(key), written(one)] for key, one in value.items()]}
            if isinstance(value, (list, tuple, set)):
                return {type(value).__name__: [written(one) for one in value]}
            return value

        return {"begun": self.begun, "values": {name: written(value) for name, value in self.values.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], arrays: Mapping[str, Any]) -> Kept:
        """Raises: KeyError, TypeError, ValueError: not what `to_json` gives."""

        def read(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            ((kind, content),) = value.items()
            if kind == "array":
                return arrays[content]
            if kind == "dict":
                return {read(key): read(one) for key, one in content}
            return {"list": list, "tuple": tuple, "set": set}[kind](read(one) for one in content)

        values = {name: read(value) for name, value in document["values"].items()}
        return cls(bool(document["begun"]), values)


def plain_values(callback: Any, longest: int | None = None, instead: Any = None) -> dict[str, Any]:
    """Copies of the plain values and arrays among the attributes of a callback, by name.

    longest: of a list, set or dictionary with more items, and of an array with more, there is `instead` in its place.
    """
    values = {}
    for name, value in vars(callback).items():
        if name in _OWN:
            continue
        if longest is not None and _items(value) > longest:
            values[name] = instead
            continue
        try:
            values[name] = _copied(value)
        except NotPlain:
            continue
    return values


def put_values(callback: Any, values: Mapping[str, Any]) -> None:
    """Give a callback the attributes of this name and value; it gets copies."""
    for name, value in values.items():
        vars(callback)[name] = copy.deepcopy(value)


def same_value(one: Any, other: Any) -> bool:
    """Whether two plain values are equal for certain; arrays never are."""
    if type(one) in _ATOMS:
        return type(one) is type(other) and (one == other or (one != one and other != other))
    if type(one) is not type(other) or isinstance(one, np.ndarray) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(map(same_value, one, other))


def _items(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.size)
    return len(value) if type(value) in (list, tuple, set, dict) else 0


def _copied(value: Any) -> Any:
    """Raises: NotPlain."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufV":
        return value.copy()
    if type(value) in (list, tuple, set):
        return type(value)(_copied(one) for one in value)
    if type(value) is dict:
        return {_copied(key): _copied(one) for key, one in value.items()}
    raise NotPlain
