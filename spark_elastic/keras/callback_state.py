"""State of Keras callbacks that is kept when `fit` is called again, and the point where it resumes.

Kept are a callback's `state_dict`, or else its attributes that are numbers, strings, arrays, or lists and dicts of
them. Other attributes (its model, files, functions) belong to one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from spark_elastic.errors import UsageError

_ATOMS = (bool, int, float, str, type(None))
_PROCESS_ATTRIBUTES = frozenset(
    {"model", "_model", "params", "validation_data", "append", "append_header", "min_delta"}
)
"""Attributes that are never kept: the model and data of the process, what it found in files, and `min_delta`, whose
sign Keras flips in each process when it first looks up whether the monitored metric improves upwards or downwards."""
_STATE_DICT = "state_dict()"
"""The name of a callback's `state_dict` among its values."""


def refuse(callback: Any, where: str, instead: Mapping[str, str], error: type[Exception]) -> None:
    """Raise the error if the callback is of a class of Keras by which there is something else to do."""
    for name, why in instead.items():
        if isinstance(callback, getattr(keras.callbacks, name, ())):
            raise error(f"the callback {name} cannot be used in {where}: {why}")


class NotPlain(Exception):
    """A value that is neither plain nor an array was to be copied."""


@dataclass(frozen=True, eq=False)
class CallbackSnapshot:
    """The plain attributes of a callback, and whether its training had begun; immutable, so never copied."""

    begun: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> CallbackSnapshot:
        return self

    @classmethod
    def of(cls, callback: Any, begun: bool) -> CallbackSnapshot:
        return cls(begun, plain_values(callback))

    def put_into(self, callback: Any) -> None:
        put_values(callback, self.values)

    def to_json(self, arrays: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return a JSON document; add the arrays to `arrays`, under names that begin with the prefix."""

        def encode(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                name = f"{prefix}{len(arrays)}"
                arrays[name] = value
                return {"array": name}
            if isinstance(value, dict):
                return {"dict": [[encode(key), encode(one)] for key, one in value.items()]}
            if isinstance(value, (list, tuple, set)):
                return {type(value).__name__: [encode(one) for one in value]}
            return value

        return {"begun": self.begun, "values": {name: encode(value) for name, value in self.values.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], arrays: Mapping[str, Any]) -> CallbackSnapshot:
        """Decode a document of `to_json`. Raises KeyError, TypeError or ValueError if it has another form."""

        def decode(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            ((kind, content),) = value.items()
            if kind == "array":
                return arrays[content]
            if kind == "dict":
                return {decode(key): decode(one) for key, one in content}
            return {"list": list, "tuple": tuple, "set": set}[kind](decode(one) for one in content)

        values = {name: decode(value) for name, value in document["values"].items()}
        return cls(bool(document["begun"]), values)


def plain_values(callback: Any) -> dict[str, Any]:
    """Return copies of the values of a callback that are kept, by name.

    Its `state_dict`, if it has one, under one name; otherwise its attributes that are plain values or arrays. Raises
    UsageError if the `state_dict` holds something else.
    """
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        try:
            return {_STATE_DICT: _copied(callback.state_dict())}
        except NotPlain:
            raise UsageError(
                f"the state_dict of {type(callback).__name__} must hold numbers, strings, arrays, and lists and dicts "
                "of them alone"
            ) from None
    values = {}
    for name, value in vars(callback).items():
        if name in _PROCESS_ATTRIBUTES:
            continue
        try:
            values[name] = _copied(value)
        except NotPlain:
            if name == "history" and isinstance(callback, keras.callbacks.History):
                values[name] = keras.tree.map_structure(_recorded, value)
    return values


def put_values(callback: Any, values: Mapping[str, Any]) -> None:
    """Set what `plain_values` has returned of a callback, or a part of it, to copies of the values."""
    for name, value in values.items():
        if name == _STATE_DICT:
            callback.load_state_dict(copy.deepcopy(value))
        else:
            vars(callback)[name] = copy.deepcopy(value)


def _copied(value: Any) -> Any:
    """Return a copy of a plain value or an array; raise NotPlain for any other value."""
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


def same(one: Any, other: Any) -> bool:
    """Return True if two plain values, or arrays, or collections of them, are equal; a NaN equals another one."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other or (one != one and other != other))


def _recorded(value: Any) -> Any:
    """Return a value of a History: tensors and variables as numbers or arrays, other objects as text."""
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        array = keras.ops.convert_to_numpy(value)
        return array if array.ndim else array.item()
    try:
        return _copied(value)
    except NotPlain:
        return str(value)


# --- where an epoch resumes -----------------------------------------------------------------------

_RESUME_POINT = "_spark_elastic_resume_point"


class FitResumePoint(NamedTuple):
    """Completed epochs that Keras does not count, and completed batches of the present epoch, of earlier `fit`s."""

    epochs: int = 0
    batches: int = 0


def set_resume_point(model: Any, point: FitResumePoint) -> None:
    """Record on a model, for its callbacks, where the present call of `fit` has resumed; valid until the next epoch."""
    object.__setattr__(model, _RESUME_POINT, point)  # Keras' own __setattr__ would track it as part of the model


def resume_point(model: Any) -> FitResumePoint:
    """Return where the present call of `fit` has resumed; epoch 0, batch 0 if that was not recorded."""
    found = getattr(model, _RESUME_POINT, None)
    return found if isinstance(found, FitResumePoint) else FitResumePoint()
