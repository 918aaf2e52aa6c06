"""Sums over the members within a forward or backward pass of Keras on torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from spark_elastic.collective.fused import add_up, excluded, group_of
from spark_elastic.collective.process_sets import ProcessSet


class _AddedUp(Function):
    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
        ctx.process_set = process_set
        return _sums(numbers, process_set)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sums = _sums(grad, ctx.process_set)
        return sums.zero_() if excluded() else sums, None


def added_up(numbers: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return the sums of the members' numbers, float64, (n,). Their gradients are the sums of the members' gradients.

    Raises: HorovodInternalError: a peer is gone.
    """
    if numbers.device.type == "meta":  # Keras asks for a shape
        return numbers
    return _AddedUp.apply(numbers, process_set)


def _sums(given: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    numbers = given.detach().clone()
    if excluded():
        numbers.zero_()
    group = group_of(process_set)
    return numbers if group is None else add_up(group, numbers)
