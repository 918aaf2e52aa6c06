"""An optimizer's steps under Keras' torch backend: gradients are added up and reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_elastic.collective.fused import FusedReduction

Gradient = torch.Tensor | None
Update = Callable[[list[Any]], None]


class Steps:
    """Reduces the gradients of one optimizer before they are applied; as `tensorflow_steps.Steps`."""

    def __init__(self, reducer: FusedReduction, passes: int, average: bool) -> None:
        self.passes = passes
        self.weight: Any = None
        self.before_update: Callable[[], None] | None = None
        """Called when the gradients have been reduced and the step counted, before they are applied."""
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
        """There is nothing to make room for in advance."""

    def at_boundary(self) -> bool:
        return self._added == 0

    def drop(self) -> None:
        self._added, self._weights = 0, 0.0
        self._sums.clear()

    @torch.no_grad()
    def reduced(self, grads: Sequence[Gradient], local: Sequence[int] = ()) -> list[Gradient]:
        return self._reduce([None if g is None else g.detach() for g in grads], None, local)

    def applies(self, update: Update, grads: Sequence[Gradient]) -> None:
        self._applied += 1
        if self.before_update is not None:
            self.before_update()
        update(list(grads))

    @torch.no_grad()
    def step(
        self, grads: Sequence[Gradient], numbers: Sequence[int], update: Update, local: Sequence[int] = ()
    ) -> None:
        weight = None if self.weight is None else float(self.weight)
        factors = [1.0 if weight is None or at in local else weight for at in range(len(grads))]
        weighed = [None if g is None else g.detach() * factor for g, factor in zip(grads, factors, strict=True)]
        if self.passes > 1:
            for number, grad in zip(numbers, weighed, strict=True):
                if grad is not None:
                    known = self._sums.get(number)
                    self._sums[number] = grad.clone() if known is None else known.add_(grad)
            self._added += 1
            self._weights += weight or 0.0
            if self._added < self.passes:
                return
            weighed = [self._sums.get(number) for number in numbers]
            if self._average or weight is not None:
                weighed = [None if g is None else g / self.passes for g in weighed]
            weight = None if weight is None else self._weights / self.passes
        reduced = self._reduce(weighed, weight, local)
        if self.passes > 1:
            if weight is not None and not self._average:
                reduced = [None if g is None else g * self.passes for g in reduced]
            self.drop()
        self._applied += 1
        if self.before_update is not None:
            self.before_update()
        update(reduced)

    def _reduce(self, grads: Sequence[Gradient], weight: float | None, local: Sequence[int]) -> list[Gradient]:
        there = [at for at, grad in enumerate(grads) if grad is not None and at not in local]
        sent = [grads[at].cpu().contiguous() for at in there]  # type: ignore[union-attr]
        carried = None if weight is None else torch.tensor([weight, 1.0], dtype=torch.float64)
        received = self._reducer(sent, carried)
        out: list[Gradient] = [None] * len(grads)
        for at, tensor in zip(there, received, strict=True):
            if carried is not None:
                tensor = tensor * float(carried[1] / carried[0])
            out[at] = tensor.to(grads[at].device)  # type: ignore[union-attr]
        divisor = 1 if self.divide_local is None or not local else self.divide_local()
        for at in local:
            own = grads[at]
            out[at] = None if own is None else own / divisor
        return out
