"""Parts of modules and optimizers beside parameters and options: counters, sizes of caches, metrics, odd buffers."""

from __future__ import annotations

import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spark_elastic.elastic.plain_values import independent_copy, is_atom
from spark_elastic.errors import UsageError

OF_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes of all modules."""
_OF_HOOKS = ("step", "state_dict", "load_state_dict")
_HOOKED = (f"_optimizer_{kind}_{when}_hooks" for kind in _OF_HOOKS for when in ("pre", "post"))
OF_OPTIMIZERS = frozenset(
    [
        *("defaults", "state", "param_groups", "step", "_inner", "_reducer", *_HOOKED),
        *("_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"),
    ]
)
"""Attributes of all optimizers, of those with a scheduler, and of a `DistributedOptimizer`; none is made to find them,
because torch imports its compiler for the first one."""

_MISSING = object()
_COLLECTIONS = frozenset({list, tuple, set, deque})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class ChangedAttributes:
    """The plain attributes of some objects that differ from what they were when the state was made.

    Attributes that never change, such as a rank or a size, and those in `ignored` stay as they are on each worker.
    """

    def __init__(self, ignored: frozenset[str]) -> None:
        self._ignored = ignored
        self._first: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def first(self, owner: Any) -> dict[str, Any]:
        """Return the plain attributes that the object had when it was first seen."""
        known = self._first.get(owner)
        if known is None:
            plain = {n: v for n, v in vars(owner).items() if n not in self._ignored and is_plain(v)}
            known = self._first[owner] = {name: independent_copy(value) for name, value in plain.items()}
        return known

    def copies(self, owners: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
        """Return copies of the changed attributes, by the key of the object and the name."""
        out = {}
        for key, owner in owners.items():
            first = self.first(owner)
            for name, value in vars(owner).items():
                before = first.get(name, _MISSING)
                if before is value or name in self._ignored or not is_plain(value):
                    continue
                if type(before) is not type(value) or before != value:
                    out[key, name] = independent_copy(value)
        return out

    def assign(self, owners: Mapping[str, Any], changed: Mapping[tuple[str, str], Any]) -> None:
        """Set the attributes in `changed`, and all other plain ones to what they were at first."""
        for key, own in self.copies(owners):
            if (key, own) in changed:
                continue
            owner = owners[key]
            first = self.first(owner)
            if own in first:
                vars(owner)[own] = independent_copy(first[own])
            else:
                del vars(owner)[own]
        for (key, name), value in changed.items():
            if key in owners:
                own = vars(owners[key])
                own[name] = put(own.get(name), value, torch.device("cpu"))


def is_plain(value: Any) -> bool:
    """Return True for numbers, strings and None, and for lists, tuples, sets, deques and dictionaries of them."""
    if is_atom(value):
        return True
    kind = type(value)
    if kind in _COLLECTIONS:
        return all(map(is_plain, value))
    if kind in _MAPPINGS:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return isinstance(value, np.generic)


def changed_in_place(value: Any) -> list[Any] | None:
    """Return the tensors, arrays and random number generators in nested containers; None if there are other objects."""
    if isinstance(value, (torch.Tensor, np.ndarray, *_GENERATORS)):
        return [value]
    if is_plain(value):
        return []
    if isinstance(value, dict):
        items = [*value.keys(), *value.values()]
    elif isinstance(value, (list, deque)) or type(value) is tuple:
        items = list(value)
    else:
        return None
    found: list[Any] = []
    for item in items:
        inner = changed_in_place(item)
        if inner is None:
            return None
        found += inner
    return found


def put(own: Any, value: Any, device: torch.device) -> Any:
    """Copy nested tensors and plain values into `own` where they fit; return what has them now.

    Tensors of a GPU that have no counterpart in `own` are put on `device`.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                own.copy_(value)
            return own
        fresh = value.detach().clone()
        return fresh if fresh.device.type == "cpu" else fresh.to(device)
    if isinstance(value, dict) and isinstance(own, dict):
        items = {key: put(own.get(key), item, device) for key, item in value.items()}
        own.clear()
        own.update(items)
        return own
    if isinstance(value, (list, deque)) and type(own) is type(value):
        padded = [*own, *[None] * len(value)]
        moved = [put(old, item, device) for old, item in zip(padded, value, strict=False)]
        own.clear()
        own.extend(moved)
        return own
    if type(value) is tuple:
        olds = own if type(own) is tuple and len(own) == len(value) else [None] * len(value)
        return tuple(put(old, item, device) for old, item in zip(olds, value, strict=True))
    return independent_copy(value)


def model_differs(how: str) -> UsageError:
    """Return the error for a model that cannot take over what another one, or the last commit, has."""
    return UsageError(
        f"the model of this worker differs from the others', or from that of the last commit: {how}; build the same "
        "model on every worker"
    )
