"""Compression of what an allreduce sends."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from spark_elastic.collective import compression as wire


class Compressor:
    """Interface: `compress` gives what is sent and a context; `decompress` turns what arrives back with it.

    wire: a cast on the way instead, which costs no copy of its own in the graph.
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


class FP16Compressor(Compressor):
    """Sends floating point tensors as float16."""

    wire = wire.FP16Compressor


class BF16Compressor(Compressor):
    """Sends floating point tensors as bfloat16: the range of float32, 8 bits of precision."""

    wire = wire.BF16Compressor


class Compression:
    """The compressions by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
