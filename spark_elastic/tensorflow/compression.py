"""Compression of what an allreduce sends."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from spark_elastic.collective import compression as wire


class Compressor:
    """Interface: `compress` gives what is sent and a context; `decompress` turns what arrives back with it.

    wire: a cast that does the same on the way, without a copy of its own in the graph. Collectives of this package use
    it in place of `compress` where there is one.
    """

    wire: type[wire.Compressor] = wire.NoneCompressor

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class _Cast(Compressor):
    to: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (tf.cast(tensor, cls.to), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Sends floating point tensors as float16."""

    wire = wire.FP16Compressor
    to = tf.float16


class BF16Compressor(_Cast):
    """Sends floating point tensors as bfloat16: the range of float32, 8 bits of precision."""

    wire = wire.BF16Compressor
    to = tf.bfloat16


class Compression:
    """The compressions by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def in_graph(compression: type[Compressor]) -> type[Compressor]:
    """What is left to do to a tensor in TensorFlow: nothing, if it is cast on the way."""
    return compression if compression.wire is wire.NoneCompressor else NoneCompressor
