"""`DistributedOptimizer`: an optimizer that averages the gradients over the world before each step."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spark_elastic.collective.operators import Average, Compression, Compressor, ReduceOp, check_gradient_op
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError
from spark_elastic.torch.gradients import BackwardReducer

stepped: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers that have made a step since an elastic state looked last."""


class DistributedOptimizerMixin:
    """The methods that `DistributedOptimizer` adds to an optimizer's class."""

    _reducer: BackwardReducer
    _inner: torch.optim.Optimizer

    @property
    def backward_passes_per_step(self) -> int:
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before they are reduced."""
        self._reducer.passes = _positive(passes)
        self._reducer.forget()

    def attach_scalars(self, numbers: torch.Tensor, sums: torch.Tensor) -> None:
        """Sum a few numbers (losses, counts) over the members together with the gradients of this step.

        Args:
            numbers: a vector of float64, of the same length on every member, on the CPU or with the parameters. Attach
                it in every step before its last `backward`. Counts are exact up to 2**24.
            sums: a vector like it on the CPU, which holds the sums after `step` or `synchronize`.
        """
        self._reducer.attach_scalars(numbers, sums)

    def synchronize(self) -> None:
        """Reduce the gradients that the last `backward` of the step has not reduced; usually there are none.

        Raises:
            HorovodInternalError: a peer is gone. No parameter has been touched; the gradients are dropped.
        """
        self._reducer.complete_step()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` in this context use the gradients as they are; reduce first what has not been reduced at all.

        Raises:
            HorovodInternalError: see `synchronize`.
        """
        if self._reducer.reduced:
            self._reducer.accept()
        self.synchronize()
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the reduced gradients; reduce first what `backward` has not reduced.

        With a closure, the gradients are reduced in each of its evaluations.

        Raises:
            HorovodInternalError: a peer is gone. No parameter has been touched, unless the optimizer evaluates its
                closure more than once.
            MismatchError: the members are at different steps.
            UsageError: it is called in a hook, while backward runs.
        """
        reducer = self._reducer
        params = [id(param) for group in self._inner.param_groups for param in group["params"]]
        if params != [id(slot.param) for slot in reducer._slots]:
            raise UsageError(
                "the parameters in optimizer.param_groups have changed, and gradients of new ones would not be "
                "reduced; use add_param_group, or make a new DistributedOptimizer"
            )

        def complete() -> None:
            reducer.complete_step()
            for function in reducer.before_step.values():
                function()

        def evaluated() -> Any:
            assert closure is not None
            before = reducer.reductions
            with torch.enable_grad():
                loss = closure()
            if reducer.reductions == before:
                reducer.forget()
            complete()
            return loss

        if closure is not None:
            result = super().step(evaluated)  # type: ignore[misc]
        else:
            complete()
            self._inner._opt_called = True  # type: ignore[attr-defined]  # read by schedulers of the inner optimizer
            result = super().step()  # type: ignore[misc]
        reducer.stepped()
        stepped.add(self)
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the inner class's step runs torch's step hooks, once

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as the optimizer's own `zero_grad` does, which gets the arguments.

        Raises:
            AssertionError: gradients are being reduced, in a `backward` that has not ended.
        """
        if self._reducer.launched:
            raise AssertionError(
                "optimizer.zero_grad() was called while gradients are being reduced: within backward(), or after one "
                "that has failed"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._reducer.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_reducer" in self.__dict__:
            self._reducer.add(param_group["params"])

    def detach(self) -> None:
        """Stop reducing gradients, so that another optimizer can be made for the model."""
        self._reducer.abandon()
        self._reducer.detach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._inner.__dict__["state"] = self.__dict__["state"]
        self._inner.__dict__["param_groups"] = self.__dict__["param_groups"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that steps with the gradients of all members.

    It is an instance of a subclass of the given optimizer's class and shares its state and parameter groups.
    Gradients are reduced in fused buckets while backward runs: when the last `backward` of a step returns, each
    `param.grad` is the reduced one, and can be clipped or scaled. A further `backward` reduces what it adds.
    A rank without a gradient for a parameter counts as zeros; a parameter of which no rank has one keeps none.

    Args:
        optimizer: any torch optimizer.
        named_parameters: names for error messages; every parameter of the optimizer must be named, once.
        compression: the compressor of the sent gradients, one of `hvd.Compression` or your own.
        backward_passes_per_step: the number of backward passes whose gradients are summed before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: divisor before the sum; after it, sums are divided by size / factor.
        num_groups: deprecated name of `groups`.
        groups: a number of buckets, or lists of parameters that share one; default: by size.
        sparse_as_dense: reduce sparse gradients as dense ones instead of gathering them.
        process_set: the processes to reduce over.

    Raises:
        UsageError: the arguments contradict each other.
    """
    check_gradient_op(op, gradient_predivide_factor)
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups <= 0:
        groups = None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    _check_groups(groups)
    reducer = BackwardReducer(
        params=params,
        names={} if named_parameters is None else _names(params, named_parameters),
        compression=compression,
        passes=_positive(backward_passes_per_step),
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    kind = type(optimizer)
    wrapped: Any = type(kind.__name__, (DistributedOptimizerMixin, kind), {"__module__": kind.__module__})
    instance = wrapped.__new__(wrapped)
    # The lists and dictionaries of the inner optimizer are shared, not copied: a learning rate scheduler for either
    # works on both. A scheduler patches `step` of its optimizer instance; that patch stays with the inner one.
    instance.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    instance._inner, instance._reducer = optimizer, reducer
    return instance


def _positive(passes: int) -> int:
    if passes < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def _names(params: Sequence[torch.Tensor], named: Iterable[Any]) -> dict[int, str]:
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UsageError("named_parameters must be (name, parameter) pairs, as model.named_parameters() gives them")
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise UsageError(f"named_parameters has these names more than once: {', '.join(twice)}")
    out = {id(param): name for name, param in pairs}
    unnamed = sum(id(param) not in out for param in params)
    if unnamed:
        raise UsageError(
            f"{unnamed} of the optimizer's {len(params)} parameters are not in named_parameters; pass those of every "
            "model that the optimizer trains"
        )
    return out


def _check_groups(groups: Any) -> None:
    if groups is None or isinstance(groups, int):
        return
    params = [param for group in groups for param in group]
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise UsageError(f"groups must be a number or lists of parameters, not of {type(param).__name__}")
    if len(set(map(id, params))) < len(params):
        raise UsageError("a parameter is in groups twice")
