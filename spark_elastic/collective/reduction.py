"""Reduction operators, and what they mean for each data type."""

from __future__ import annotations

import math
import warnings
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.errors import UnsupportedOperationError, UsageError

_Gloo: Any = dist.ReduceOp.RedOpType  # its members are not in the type stubs


class ReduceOp(Enum):
    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"
    Adasum = "adasum"

    @property
    def gloo(self) -> Any:
        """Gloo's operator below it; an average is a sum that is divided."""
        if self is ReduceOp.Adasum:
            raise UnsupportedOperationError(
                "Adasum is not supported; use op=hvd.Average (and scale the learning rate by hvd.size())"
            )
        return _GLOO[self]


_GLOO = {
    ReduceOp.Average: _Gloo.SUM,
    ReduceOp.Sum: _Gloo.SUM,
    ReduceOp.Min: _Gloo.MIN,
    ReduceOp.Max: _Gloo.MAX,
    ReduceOp.Product: _Gloo.PRODUCT,
}

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
Adasum = ReduceOp.Adasum

_WIDENED = {torch.int16: torch.int32}
"""Types that Gloo does not reduce, and the type they are reduced in."""


def wire_type(dtype: torch.dtype) -> torch.dtype:
    """The type that values of `dtype` are reduced in.

    Raises: UsageError: for types that have no sensible reduction.
    """
    if dtype.is_complex:
        raise UsageError(f"{dtype} tensors cannot be reduced; reduce torch.view_as_real(tensor)")
    return _WIDENED.get(dtype, dtype)


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The operator of a call; `average` is Horovod's older way to say it.

    Raises: ValueError: if both are given.
    """
    if average is None:
        return op or Average
    if op is not None:
        raise ValueError("give either op or average, not both; op replaces average")
    warnings.warn("average= is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def check_of_gradients(op: ReduceOp, predivide: float) -> None:
    """Raises: UsageError: gradients are not reduced like this."""
    if op is Adasum:
        _ = op.gloo
    if op not in (Average, Sum):
        raise UsageError(f"gradients are reduced with op=hvd.Average or op=hvd.Sum, not {op}")
    if predivide != 1.0 and op is not Average:
        raise UsageError("gradient_predivide_factor needs op=hvd.Average")


def factors(op: ReduceOp, predivide: float, size: int, wire: torch.dtype) -> tuple[float, float]:
    """What gradients are multiplied by before they are added up over `size` members, and after it.

    Args:
        predivide: of an average, what is divided by before. By default all of it, which costs nothing extra, since
            gradients are copied anyway; of float16 about the square root, see `half_of`.
        wire: the type that they are added up in.
    """
    divisor = size if op is Average else 1
    if predivide != 1.0:
        return 1.0 / predivide, predivide / divisor
    if wire is torch.float16:
        before = half_of(size)
        return before, 1.0 / (divisor * before)
    return 1.0 / divisor, 1.0


def half_of(size: int) -> float:
    """A power of two near 1 / sqrt(size), by which float16 values are multiplied before `size` of them are added up.

    float16 reaches from 6e-8 to 65,504. Divided by the size, a gradient of 1e-6 is nothing from 64 members on; not
    divided at all, the sum of 64 values of 1,024 is infinite. With about half of the division before, the one is still
    there and 8,000 fit. What is too large becomes infinite, as loss scalers expect; nothing is clipped.
    """
    return 2.0 ** -round(math.log2(size) / 2)


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; integers are multiplied as real numbers and cut off, as an integer average is."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor + 0.0).trunc_())
