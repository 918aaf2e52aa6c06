"""Find out what modules and optimizers lose when they are copied for another process or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Facts = dict[tuple[str, str], Any]  # what training depends on, by the path of an object and the aspect of it

_UNIMPORTANT = {"step", "_opt_called", "_warned_capturable_if_run_uncaptured"}  # kept by torch for its warnings


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what differs between objects and their copies, both by name, as phrases for an error message."""
    here, there = describe(before), describe(after)
    return [
        f"{aspect} of {path}: {here.get((path, aspect))} here, {there.get((path, aspect))} there"
        for path, aspect in {**here, **there}
        if here.get((path, aspect)) != there.get((path, aspect))
    ]


def describe(values: Mapping[str, Any]) -> Facts:
    """Return the facts about all modules and optimizers among the values; the names are the first part of each path."""
    facts: Facts = {}
    first: dict[int, str] = {}
    storages: dict[int, str] = {}
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            for path, part in value.named_modules(prefix=name, remove_duplicate=False):
                facts[path, "the object"] = first.setdefault(id(part), path)
                facts[path, "the class"] = type(part).__qualname__
                facts[path, "the mode"] = "train" if part.training else "eval"
                facts[path, "the hooks"] = _hooks_of(part)
            for path, tensor in tensors_of(value, name):
                facts |= {(path, aspect): each for aspect, each in _tensor_facts(path, tensor, first, storages).items()}
    for name, value in values.items():
        if isinstance(value, torch.optim.Optimizer):
            facts[name, "the class"] = type(value).__qualname__
            facts[name, "the hooks"] = _hooks_of(value)
            facts[name, "the attributes"] = sorted(vars(value).keys() - _UNIMPORTANT)
            facts[name, "the groups"] = [_group(group, first) for group in value.param_groups]
            facts[name, "the state"] = sorted((first.get(id(param), ""), *each) for param, each in value.state.items())
    return facts


def tensors_of(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the path and the value of each parameter, buffer and attribute of a module that is a tensor."""
    for path, part in module.named_modules(prefix=name):
        for key, value in {**part._parameters, **part._buffers, **vars(part)}.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}" if path else key, value


def hooks_of(tensor: torch.Tensor) -> tuple[Mapping[int, Callable[..., Any]], Mapping[int, Callable[..., Any]]]:
    """Return the hooks that get a tensor's gradient, and those that get the tensor when it has its gradient."""
    after = tensor._post_accumulate_grad_hooks
    return tensor._backward_hooks or {}, after or {}


def _tensor_facts(
    path: str, tensor: torch.Tensor, first: dict[int, str], storages: dict[int, str]
) -> Mapping[str, Any]:
    facts: dict[str, Any] = {
        "the object": first.setdefault(id(tensor), path),
        "the class": type(tensor).__qualname__,
        "the type": str(tensor.dtype),
    }
    if torch.nn.parameter.is_lazy(tensor):
        return facts
    facts["requires_grad"] = tensor.requires_grad
    # the result of a forward pass arrives without the graph that its hooks belong to
    facts["the hooks"] = [_name(hook) for each in hooks_of(tensor) for hook in each.values() if tensor.is_leaf]
    facts["the attributes"] = sorted(vars(tensor))
    facts["the shape"] = list(tensor.shape)
    if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
        at = storages.setdefault(tensor.untyped_storage().data_ptr(), path)
        facts["the memory"] = f"{at}, offset {tensor.storage_offset()}, strides {list(tensor.stride())}"
    return facts


def _hooks_of(owner: Any) -> dict[str, list[str]]:
    own = {name: each for name, each in vars(owner).items() if isinstance(each, Mapping)}  # no list of handles
    found = {name: each for name, each in own.items() if name.endswith("_hooks") and each}
    return {name: [_name(hook) for hook in each.values()] for name, each in found.items()}


def _name(hook: Any) -> str:
    hook = getattr(hook, "hook", hook)  # torch wraps some of them, and a copied wrapper has lost its name
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _group(group: Mapping[str, Any], first: Mapping[int, str]) -> dict[str, Any]:
    plain = {name: each for name, each in group.items() if isinstance(each, (bool, int, float, str, type(None), tuple))}
    return {**dict.fromkeys(group), **plain, "params": [first.get(id(param), "") for param in group["params"]]}
