"""The parameters whose gradients are reduced: the hooks by which their reducers observe them, and who owns which."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from spark_elastic.collective.fused import Bucket
from spark_elastic.errors import UsageError


class Owner(Protocol):
    """The one reducer of a parameter's gradient. Parameters are numbered in the order in which it observes them."""

    replaced: bool
    """Another reducer has taken over a parameter."""

    def computed(self, index: int) -> None:
        """Backward has added to the gradient of the parameter with this number."""

    def set_aside(self) -> None:
        """Backward is about to add to a gradient."""

    def abandon(self) -> None:
        """The gradients of the present step are of no use."""


CONVERTED = (
    "the type or device of parameters has changed since gradients were reduced; make the DistributedOptimizer after "
    "model.to(), model.double() and the like"
)
_unscaling: weakref.WeakSet[GradScaler] = weakref.WeakSet()
"""The scalers that have unscaled gradients since the last loss."""
_owners = WeakTensorKeyDictionary()
"""A weak reference to the owner of each parameter, and the handles of its hooks."""


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


def holds(reducer: Any, params: Sequence[torch.Tensor]) -> bool:
    """Return True if these are the parameters of a reducer, in its order."""
    slots = reducer._slots
    return len(params) == len(slots) and all(param is slot.param for param, slot in zip(params, slots, strict=True))


def check_frozen(slots: Sequence[GradientSlot], results: Sequence[torch.Tensor | None]) -> None:
    """Check that frozen parameters have no gradients but the results of a reduction, which are of the first slots.

    Raises:
        UsageError: a parameter has one.
    """
    for slot, result in zip(slots, [*results, *[None] * (len(slots) - len(results))], strict=True):
        if not slot.param.requires_grad and has_other(slot, result):
            raise UsageError(
                f"a parameter of shape {list(slot.param.shape)} that does not require a gradient has one, which was "
                "not reduced; set its grad to None, or its requires_grad to True"
            )


def observe(owner: Owner, param: torch.nn.Parameter, index: int, before_each: bool) -> Any:
    """Make `owner` the owner of a parameter, also if that is unfrozen later.

    Args:
        owner: is referred to weakly: the hooks of a discarded optimizer must stop sending.
        param: the parameter.
        index: the number for `owner.computed`.
        before_each: call `owner.set_aside` too.

    Returns:
        None, or with `before_each` autograd's node that adds to the gradient: the hook ends with it.

    Raises:
        UsageError: the parameter has no shape yet.
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


def stop_observing(owner: Owner, param: torch.nn.Parameter) -> None:
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


def _noting(unscale: Callable[..., None]) -> Callable[..., None]:
    """Return `GradScaler.unscale_` that notes the scaler, which refuses to unscale once more when a step is repeated.

    A scaler may be outside of every state, and nothing else tells of it.
    """

    @functools.wraps(unscale)
    def unscale_(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if scaler.is_enabled():
            _unscaling.add(scaler)
        unscale(scaler, optimizer)

    return unscale_


GradScaler.unscale_ = _noting(GradScaler.unscale_)  # type: ignore[method-assign]


def _hook(owner: weakref.ref[Any], method: str, *args: Any) -> Callable[..., None]:
    """Return a hook that calls the method of an owner as long as that exists."""

    def hook(_: Any) -> None:
        if (present := owner()) is not None:
            getattr(present, method)(*args)

    return hook
