"""The parameters whose gradients are reduced: the hooks by which their reducers observe them, and who owns which."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from spark_elastic.collective.fused import Bucket
from spark_elastic.errors import UsageError

CONVERTED = (
    "the type or device of parameters has changed since gradients were reduced; make the DistributedOptimizer after "
    "model.to(), model.double() and the like"
)
_unscaling: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""The scalers that have unscaled gradients since the last loss."""
_owners = WeakTensorKeyDictionary()
"""A weak reference to the owner of each parameter, the reducer of its gradient, and the handles of its hooks."""


@dataclass(slots=True, eq=False)
class GradientSlot:
    """A parameter of a reducer, and the state of its gradient in the present step."""

    param: torch.nn.Parameter
    bucket: Bucket | None = None
    """The bucket of the gradient; None if the gradient is sparse and gathered, or the parameter is frozen."""
    computed: bool = False
    """The present backward has added to the gradient."""
    before: torch.Tensor | None = None
    """The reduced gradient to which the sum of what a further backward adds is added; for Sum alone."""
    node: Any = None
    """The node of `observe`."""


def has_other(slot: GradientSlot, result: torch.Tensor | None) -> bool:
    """Return True if the parameter has a gradient, and it is another tensor than `result`."""
    grad = slot.param.grad
    return grad is not None and grad is not result


def are_finite(slots: Sequence[GradientSlot]) -> bool:
    """Return True if there are gradients, and all their values are finite."""
    grads = [slot.param.grad for slot in slots if slot.param.grad is not None]
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    return bool(values) and all(bool(each.isfinite().all()) for each in values)


def check_frozen(slots: Sequence[GradientSlot], results: Sequence[torch.Tensor | None]) -> None:
    """Raise UsageError if frozen parameters have other gradients than the results, which are of the first slots."""
    for slot, result in zip(slots, [*results, *[None] * (len(slots) - len(results))], strict=True):
        if not slot.param.requires_grad and has_other(slot, result):
            raise UsageError(
                f"a parameter of shape {list(slot.param.shape)} that does not require a gradient has one, which was "
                "not reduced; set its grad to None, or its requires_grad to True"
            )


def observe(owner: Any, param: torch.nn.Parameter, index: int, before_each: bool) -> Any:
    """Make `owner` the owner of a parameter, also if that is unfrozen later.

    The hooks call `owner.computed(index)` and, with `before_each`, `owner.set_aside()`. They refer to it weakly: those
    of a discarded optimizer must stop sending. Raises UsageError if the parameter has no shape yet.

    Returns:
        None, or with `before_each` autograd's node that adds to the gradient: the hook ends with it.
    """
    if is_lazy(param):
        raise UsageError(
            "a parameter of a lazy module has no shape yet; call the model on a batch before making the "
            "DistributedOptimizer"
        )
    replaced = _remove_hooks(param)
    if replaced is not None and replaced is not owner:
        replaced.replaced = True
    me, node = weakref.ref(owner), None
    hooks: list[Any] = []
    _owners[param] = me, hooks
    if not (param.is_floating_point() or param.is_complex()) or param.is_inference():
        return None
    frozen = not param.requires_grad
    if frozen:  # torch registers no hook on such a parameter, but keeps the hooks of one that is frozen
        param.requires_grad_(True)
    hooks.append(param.register_post_accumulate_grad_hook(_hook(me, "computed", index)))
    if before_each:  # not `param.register_hook`, which torch.autograd.grad runs too
        node = get_gradient_edge(param).node
        hooks.append(node.register_prehook(_hook(me, "set_aside")))
    if frozen:
        param.requires_grad_(False)
    return node


def stop_observing(owner: Any, param: torch.nn.Parameter) -> None:
    """Remove the hooks of a parameter, unless it has another owner."""
    if _owners.get(param, (None,))[0] == weakref.ref(owner):
        _remove_hooks(param)


def _remove_hooks(param: torch.nn.Parameter) -> Any:
    """Remove the hooks of a parameter; return its owner, or None."""
    reference, hooks = _owners.pop(param, (lambda: None, ()))
    for hook in hooks:
        hook.remove()
    return reference()


def reducers() -> list[Any]:
    """Return the owners in this process that have parameters."""
    return list({id(owner): owner for reference, _ in _owners.values() if (owner := reference()) is not None}.values())


def abandon_steps() -> None:
    """Drop the gradients of the present steps of all reducers in this process, and that `GradScaler`s unscaled them."""
    for reducer in reducers():
        reducer.abandon()
    for scaler in list(_unscaling):
        scaler._per_optimizer_states.clear()
    _unscaling.clear()


_plain_unscale = GradScaler.unscale_


@functools.wraps(_plain_unscale)
def _noted_unscale(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Note the scaler, which may be outside of every state, and would refuse to unscale when a step is repeated."""
    if scaler.is_enabled():
        _unscaling.add(scaler)
    _plain_unscale(scaler, optimizer)


GradScaler.unscale_ = _noted_unscale  # type: ignore[method-assign, assignment]


def _hook(owner: weakref.ref[Any], method: str, *args: Any) -> Callable[..., None]:
    """Return a hook that calls the method of an owner as long as that exists."""

    def hook(_: Any) -> None:
        if (present := owner()) is not None:
            getattr(present, method)(*args)

    return hook
