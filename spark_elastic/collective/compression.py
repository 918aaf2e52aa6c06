"""Compression of what an allreduce sends."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.collective.reduction import Average, ReduceOp, Sum, factors


class Compressor:
    """Interface: `compress` gives what is sent and a context; `decompress` turns what arrives back with it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends floating point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating point tensors as bfloat16: the range of float32, 8 bits of precision."""

    dtype = torch.bfloat16


def around_sum(
    compression: type[Compressor], op: ReduceOp, size: int, dtype: torch.dtype
) -> tuple[ReduceOp, float, float]:
    """How to reduce compressed tensors so that neither small nor large values are lost on the way.

    Returns: the operator for what is sent, and what to multiply by before compressing and after decompressing.
    """
    if size == 1 or op not in (Average, Sum) or not dtype.is_floating_point:
        return op, 1.0, 1.0
    if not (issubclass(compression, _CastCompressor) and compression.dtype is torch.float16):
        return op, 1.0, 1.0
    return Sum, *factors(op, 1.0, size, torch.float16)


class Compression:
    """The compressions by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
