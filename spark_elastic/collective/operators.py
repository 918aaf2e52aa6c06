"""Reduction operators, the scaling around a sum, and the compression of the values that are sent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.errors import UnsupportedOperationError, UsageError

_Gloo: Any = dist.ReduceOp.RedOpType  # its members are not in the type stubs

# --- operators --------------------------------------------------------------------------------------


class ReduceOp(Enum):
    """The operators that users can choose from."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"
    Adasum = "adasum"

    @property
    def gloo(self) -> Any:
        """The operator of Gloo; for an average, the sum. Raises UnsupportedOperationError for Adasum."""
        if self is ReduceOp.Adasum:
            raise UnsupportedOperationError(
                "Adasum is not supported; use op=hvd.Average (and scale the learning rate by hvd.size())"
            )
        return _Gloo.SUM if self is ReduceOp.Average else getattr(_Gloo, self.name.upper())


Average = ReduceOp.Average
"""The mean over the members."""
Sum = ReduceOp.Sum
"""The sum over the members."""
Min = ReduceOp.Min
"""The minimum over the members, of each element."""
Max = ReduceOp.Max
"""The maximum over the members, of each element."""
Product = ReduceOp.Product
"""The product over the members, of each element."""
Adasum = ReduceOp.Adasum
"""Horovod's adaptive sum. Not supported: a call raises `UnsupportedOperationError`."""


def wire_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that values of `dtype` are reduced in. Raise UsageError for one without a sensible reduction."""
    if dtype.is_complex:
        raise UsageError(f"{dtype} tensors cannot be reduced; reduce torch.view_as_real(tensor)")
    return torch.int32 if dtype is torch.int16 else dtype  # Gloo does not reduce int16


def resolve_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operator that a call asks for; `average` is Horovod's older argument. Raise ValueError for both."""
    if average is None:
        return op or Average
    if op is not None:
        raise ValueError("give either op or average, not both; op replaces average")
    warnings.warn("average= is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def check_gradient_op(op: ReduceOp, predivide: float) -> None:
    """Raise UsageError for another operator than Average or Sum, or a predivide factor without Average."""
    if op is Adasum:
        _ = op.gloo  # raises
    if op not in (Average, Sum):
        raise UsageError(f"gradients are reduced with op=hvd.Average or op=hvd.Sum, not {op}")
    if predivide != 1.0 and op is not Average:
        raise UsageError(f"gradient_predivide_factor={predivide} needs op=hvd.Average, not {op}")


# --- scaling ----------------------------------------------------------------------------------------


def scaling_factors(op: ReduceOp, predivide: float, size: int, wire: torch.dtype) -> tuple[float, float]:
    """Return the factors to multiply gradients by before and after their sum over `size` members, in the type `wire`.

    `predivide` is the divisor before the sum, if not 1. By default an average is divided completely before the sum:
    that costs nothing extra, since gradients are copied anyway.
    """
    divisor = size if op is Average else 1
    if predivide != 1.0:
        return 1.0 / predivide, predivide / divisor
    if wire is torch.float16:
        # The range is 6e-8 to 65,504. If gradients are divided by the size before the sum, one of 1e-6 becomes 0 from
        # 64 members on; if they are not, the sum of 64 values of 1,024 is infinite. A power of two near 1 / sqrt(size)
        # keeps 1e-6, and values up to 8,000. Larger ones become infinite, as loss scalers expect; nothing is clipped.
        before = 2.0 ** -round(math.log2(size) / 2)
        return before, 1.0 / (divisor * before)
    return 1.0 / divisor, 1.0


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place and return the tensor; results for integers are truncated."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor + 0.0).trunc_())


# --- compression ------------------------------------------------------------------------------------


class Compressor:
    """Interface of compressors, for tensors of torch and of TensorFlow. This one sends tensors as they are.

    To write your own, override both methods: `compress` returns the tensor to send and a context of any type, and
    `decompress` gets the received tensor and that context.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class CastCompressor(Compressor):
    """Sends floating point tensors as `dtype`, others as they are. The context is the original type, or None."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = tensor.dtype
        is_floating = dtype.is_floating_point if isinstance(tensor, torch.Tensor) else dtype.is_floating
        return (_cast(tensor, cls.dtype), dtype) if is_floating else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else _cast(tensor, ctx)


def _cast(tensor: Any, dtype: Any) -> Any:
    if isinstance(tensor, torch.Tensor):
        return tensor.to(dtype)
    import tensorflow as tf  # here: only programs that use TensorFlow load it

    return tf.cast(tensor, str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)


class FP16Compressor(CastCompressor):
    """Sends floating point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(CastCompressor):
    """Sends floating point tensors as bfloat16: the range of float32, with 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compressed_sum_scaling(
    compression: type[Compressor], op: ReduceOp, size: int, dtype: torch.dtype
) -> tuple[ReduceOp, float, float]:
    """Choose how to reduce float16 tensors so that no sum overflows and no small value vanishes.

    Returns the operator for compressed tensors, and the factors before `compress` and after `decompress`.
    """
    to_float16 = issubclass(compression, CastCompressor) and compression.dtype is torch.float16
    if size == 1 or op not in (Average, Sum) or not dtype.is_floating_point or not to_float16:
        return op, 1.0, 1.0
    return Sum, *scaling_factors(op, 1.0, size, torch.float16)


def reduce_compressed(
    tensors: Sequence[torch.Tensor],
    compression: type[Compressor],
    op: ReduceOp,
    size: int,
    reduce: Callable[[ReduceOp, list[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Compress and scale tensors, reduce them over `size` members, and undo both.

    `reduce` reduces compressed tensors with an operator; it is called twice if only some of the tensors are compressed.
    """
    scaling = [compressed_sum_scaling(compression, op, size, tensor.dtype) for tensor in tensors]
    results: list[Any] = [None] * len(tensors)
    for how in dict.fromkeys(each for each, _, _ in scaling):
        indexes = [index for index, (other, _, _) in enumerate(scaling) if other is how]
        sent = [compression.compress(_times(tensors[index], scaling[index][1])) for index in indexes]
        received = reduce(how, [tensor for tensor, _ in sent])
        for index, tensor, (_, context) in zip(indexes, received, sent, strict=True):
            results[index] = _times(compression.decompress(tensor, context), scaling[index][2])
    return results


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else tensor * factor
