"""Reductions of Keras on torch: the gradients of a step, and batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from spark_elastic.collective.batch_statistics import is_without_rows, sum_rows
from spark_elastic.collective.fused import FusedReduction
from spark_elastic.collective.process_sets import ProcessSet
from spark_elastic.collective.replicas import VariableComparison

Gradient = torch.Tensor | None
Update = Callable[[list[Any]], None]


class TorchSteps:
    """The steps of one optimizer, like `tensorflow_backend.TensorFlowSteps`, which documents arguments and methods."""

    def __init__(self, reducer: FusedReduction, passes: int, average: bool) -> None:
        self.passes = passes
        self.weight: Any = None
        self.divide_local: Callable[[], int] | None = None
        self._reducer = reducer
        self._average = average
        self._applied = 0
        self._added = 0
        self._weights = 0.0
        self._sums: dict[int, torch.Tensor] = {}

    def applied(self) -> int:
        return self._applied

    def build(self, variables: Sequence[Any]) -> None:
        """Do nothing: accumulators are created when they are needed."""

    def at_boundary(self) -> bool:
        return self._added == 0

    def drop(self) -> None:
        self._added, self._weights = 0, 0.0
        self._sums.clear()

    @torch.no_grad()
    def reduced(self, grads: Sequence[Gradient], variables: Sequence[Any], local: Sequence[int] = ()) -> list[Gradient]:
        return self._reduce([None if g is None else g.detach() for g in grads], None, variables, local)

    def applies(self, update: Update, grads: Sequence[Gradient]) -> None:
        self._applied += 1
        update(list(grads))

    @torch.no_grad()
    def step(
        self,
        grads: Sequence[Gradient],
        numbers: Sequence[int],
        update: Update,
        variables: Sequence[Any],
        local: Sequence[int] = (),
    ) -> None:
        weight = None if self.weight is None else float(self.weight)
        factors = [1.0 if weight is None or at in local else weight for at in range(len(grads))]
        weighted = [None if g is None else g.detach() * factor for g, factor in zip(grads, factors, strict=True)]
        if self.passes > 1:
            for number, grad in zip(numbers, weighted, strict=True):
                if grad is not None:
                    total = self._sums.get(number)
                    self._sums[number] = grad.clone() if total is None else total.add_(grad)
            self._added += 1
            self._weights += weight or 0.0
            if self._added < self.passes:
                return
            weighted = [self._sums.get(number) for number in numbers]
            if self._average or weight is not None:
                weighted = [None if g is None else g / self.passes for g in weighted]
            weight = None if weight is None else self._weights / self.passes
        reduced = self._reduce(weighted, weight, variables, local)
        if self.passes > 1:
            if weight is not None and not self._average:
                reduced = [None if g is None else g * self.passes for g in reduced]
            self.drop()
        self.applies(update, reduced)

    def _reduce(
        self, grads: Sequence[Gradient], weight: float | None, variables: Sequence[Any], local: Sequence[int]
    ) -> list[Gradient]:
        shared = [at for at, grad in enumerate(grads) if grad is not None and at not in local]
        sent = [grads[at].cpu().contiguous() for at in shared]  # type: ignore[union-attr]
        scalars = None if weight is None else torch.tensor([weight, 1.0], dtype=torch.float64)
        trained = [variable for at, variable in enumerate(variables) if at not in local]
        comparison = VariableComparison(lambda: [(each.path, each.value) for each in trained], _values)
        received = self._reducer(sent, scalars, comparison)
        out: list[Gradient] = [None] * len(grads)
        for at, tensor in zip(shared, received, strict=True):
            if scalars is not None:  # divided by the sum of weights, times the size: the weighted average (or sum)
                tensor = tensor * float(scalars[1] / scalars[0])
            out[at] = tensor.to(grads[at].device)  # type: ignore[union-attr]
        divisor = 1 if self.divide_local is None or not local else self.divide_local()
        for at in local:
            own = grads[at]
            out[at] = None if own is None else own / divisor
        return out


def _values(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().cpu()


# --- batch statistics -----------------------------------------------------------------------------


def sum_over_members(numbers: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """As `tensorflow_backend.sum_over_members`."""
    if numbers.device.type == "meta":  # Keras infers a shape
        return numbers
    return _SumOverMembers.apply(numbers, process_set)


class _SumOverMembers(Function):
    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
        ctx.process_set = process_set
        return sum_rows(numbers, process_set)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sums = sum_rows(grad, ctx.process_set)
        return sums.zero_() if is_without_rows() else sums, None
