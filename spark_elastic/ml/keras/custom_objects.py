"""The classes and functions of a user that a Keras configuration names, and where they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import keras

from spark_elastic.errors import NotPicklableError

_OWN = ("name", "dtype", "trainable", "reduction", "self")
"""Arguments that Keras itself keeps."""


def own_names(value: Any, config: Any) -> list[str]:
    """Names in the configuration of `value` that stand for classes and functions that are not Keras's own: what
    `custom_objects` has to have if they are not registered. Lambdas are "<lambda>".

    Raises: NotPicklableError: Keras would take a function for one of its own.
    """
    for name, each in _within(value):
        if isinstance(each, FunctionType) and is_builtin(name):
            raise NotPicklableError(
                f"the function {name} has the name of one of Keras's, which the model would get instead of it; give it "
                "another name"
            )
    return [name for name in _names_in(config) if not is_builtin(name)]


def custom_objects_of(value: Any, names: Sequence[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """By name: those of `names` that were given, are classes and functions within `value` itself, or are registered."""
    made = dict(given or {})
    missing = [name for name in names if name not in made]
    within = dict(_within(value)) if missing else {}
    for name in missing:
        found = within.get(name, keras.saving.get_registered_object(name))
        if found is not None:
            made[name] = found
    return made


def is_builtin(function: str) -> bool:
    """Whether Keras has a function of this name where it looks for those that configurations name."""
    places = (keras.activations, keras.initializers, keras.losses, keras.metrics, keras.regularizers, keras.constraints)
    return any(hasattr(place, function) for place in places)


def _names_in(config: Any) -> list[str]:
    """All that could be somebody's own; of functions Keras does not write down which module they are of."""
    found: dict[str, None] = {}
    stack = [config]
    while stack:
        node = stack.pop()
        if isinstance(node, (list, tuple)):
            stack += reversed(node)
        elif isinstance(node, Mapping):
            if (name := _name(node)) is not None:
                found[name] = None
            stack += reversed(list(node.values()))
    return list(found)


def _name(node: Mapping[str, Any]) -> str | None:
    kind = node.get("class_name")
    if not isinstance(kind, str) or "config" not in node:
        return None
    if kind == "__lambda__":
        return "<lambda>"
    if str(node.get("module") or "").partition(".")[0] == "keras":  # its own Functional has a registered name, too
        return None
    if kind == "function":
        return node["config"] if isinstance(node["config"], str) else None
    registered = node.get("registered_name")
    return str(registered) if registered is not None else None


def not_described(value: Any) -> str | None:
    """The class of `value` if its configuration forgets arguments of its constructor; None: it does not.

    Keras writes down arguments by itself only for layers: of a Model it keeps their defaults, of a Metric nothing.
    """
    kind = type(value)
    maker = next(each for each in kind.__mro__ if "__init__" in vars(each))
    teller = next((each for each in kind.__mro__ if "get_config" in vars(each)), object)
    if maker.__module__.partition(".")[0] == "keras" or teller in kind.__mro__[: kind.__mro__.index(maker) + 1]:
        return None
    if isinstance(value, keras.layers.Layer) and not isinstance(value, keras.Model):
        return None
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    own = [
        each.name
        for each in inspect.signature(maker.__init__).parameters.values()  # type: ignore[misc]
        if each.kind not in variable and each.name not in _OWN
    ]
    return kind.__name__ if own else None


def _within(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, class or function) of all that a layer, model, optimizer, ... refers to and that is not Keras's own."""
    stack, seen = [value], set()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (list, tuple, set, frozenset)):
            stack += each
        elif isinstance(each, Mapping):
            stack += each.values()
        elif isinstance(each, FunctionType):
            if each.__module__.partition(".")[0] != "keras":
                yield keras.saving.get_registered_name(each), each
        elif hasattr(type(each), "get_config"):
            if type(each).__module__.partition(".")[0] != "keras":
                yield keras.saving.get_registered_name(type(each)), type(each)
            stack += getattr(each, "__dict__", {}).values()
