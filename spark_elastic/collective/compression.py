"""Compression of what an allreduce sends."""

from __future__ import annotations

from typing import Any

import torch


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


class Compression:
    """The compressions by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
