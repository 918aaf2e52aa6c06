"""Find out what Keras models and optimizers lose in another process, and send what their configurations leave out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from spark_elastic.ml.keras.serialization import Array


def adapters_of(model: Any) -> list[tuple[int, Any, list[Array]]]:
    """Return number, alpha and values of the layers with LoRA, which Keras merges into the kernel in an archive."""
    layers = enumerate(model._flatten_layers())
    with_lora = [(at, each) for at, each in layers if getattr(each, "lora_enabled", False)]
    return [(at, each.lora_alpha, [value.numpy() for value in each.variables]) for at, each in with_lora]


def restore_adapters(model: Any, adapters: Sequence[tuple[int, Any, Sequence[Array]]]) -> None:
    layers = list(model._flatten_layers()) if adapters else []
    for at, alpha, values in adapters:
        layers[at].lora_alpha = alpha
        for variable, value in zip(layers[at].variables, values, strict=True):
            variable.assign(value)


def undecayed(value: Any, error: type[Exception]) -> list[str]:
    """Return the patterns of variables that an optimizer, and those within it, do not decay; [] if there are none."""
    patterns = []
    while value is not None:
        if getattr(value, "_exclude_from_weight_decay", None):
            raise error(
                "exclude_from_weight_decay(var_list=...) names variables, and the workers have others; give var_names, "
                "patterns of the names of variables"
            )
        pattern = getattr(value, "_exclude_from_weight_decay_pattern", None)
        patterns.append("" if pattern is None else str(pattern.pattern))
        value = getattr(value, "inner_optimizer", None)
    return patterns if any(patterns) else []


def differences(one: Any, other: Any) -> list[str]:
    """Return what differs between a built model or layer and its copy, as phrases for an error message."""
    facts = [_facts_of(each) for each in (one, other)]
    if len(facts[0]) != len(facts[1]):
        return [f"{len(facts[0])} layers and variables here, {len(facts[1])} there"]
    return [f"{here} here, {there} there" for here, there in zip(*facts, strict=True) if here[1:] != there[1:]]


def different_values(one: Any, other: Any) -> list[str]:
    """Return which weights of a model and its copy have other values; they have equal `differences`."""
    pairs = zip(one.weights, other.weights, strict=True)
    return [
        f"the values of {here.path}"
        for here, there in pairs
        if not np.array_equal(here.numpy(), there.numpy(), equal_nan=np.dtype(here.numpy().dtype).kind == "f")
    ]


def arguments_of(value: Any) -> list[str]:
    """Return the arguments of a user's object and its parts that are attributes: a get_config may leave them out."""
    found = []
    for prefix, each in [("", value), *((f"{name}.", each) for name, each in sorted(vars(value).items()))]:
        if hasattr(type(each), "get_config") and type(each).__module__.partition(".")[0] != "keras":
            names = inspect.signature(type(each).__init__).parameters.keys() & getattr(each, "__dict__", {}).keys()
            values = {name: vars(each)[name] for name in sorted(names - {"name", "dtype", "trainable"})}
            plain = (bool, int, float, str, type(None), np.generic)
            found += [f"{prefix}{name}={one}" for name, one in values.items() if isinstance(one, plain)]
    return found


def _facts_of(model: Any) -> list[tuple[Any, ...]]:
    """Return name, kind and flags of each layer and variable, and the number of the first that is the same object."""
    first: dict[int, int] = {}
    layers, variables = list(model._flatten_layers()), model.variables
    numbers = [first.setdefault(id(each), at) for at, each in enumerate((*layers, *variables))]
    of_layers: list[tuple[Any, ...]] = [
        (one.name, at, type(one).__name__, one.dtype_policy.name, f"trainable={one.trainable}", *arguments_of(one))
        for one, at in zip(layers, numbers, strict=False)
    ]
    return of_layers + [
        (each.path, number, list(each.shape), str(each.dtype), f"trainable={each.trainable}")
        for each, number in zip(variables, numbers[len(layers) :], strict=True)
    ]
