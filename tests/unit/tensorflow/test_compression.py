"""Torch and TensorFlow share the compressors, and users can write custom ones."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import torch

import spark_elastic.keras as on_keras
import spark_elastic.tensorflow as hvd
import spark_elastic.torch as on_torch
from spark_elastic.collective.reduction import Compressor
from tests.unit.worlds import together


def test_casts_convert_floating_point_tensors_of_both_frameworks_and_back():
    assert hvd.Compression is on_torch.Compression is on_keras.Compression
    for compressor, name in ((hvd.Compression.fp16, "float16"), (hvd.Compression.bf16, "bfloat16")):
        sent, context = compressor.compress(tf.constant([1.5, 2.0], tf.float64))
        assert sent.dtype.name == name
        assert compressor.decompress(sent, context).dtype == tf.float64
        sent, context = compressor.compress(torch.tensor([1.5, 2.0], dtype=torch.float64))
        assert sent.dtype == getattr(torch, name)
        assert compressor.decompress(sent, context).dtype == torch.float64

    for tensor in (tf.constant([3]), torch.tensor([3])):
        sent, context = hvd.Compression.fp16.compress(tensor)
        assert sent is tensor
        assert hvd.Compression.fp16.decompress(sent, context) is tensor


class Halved(Compressor):
    """A custom compressor for tensors of TensorFlow and torch: it sends half of each value."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, "halved"

    @staticmethod
    def decompress(tensor, ctx):
        assert ctx == "halved"
        return tensor * 2


def with_custom_compressor():
    hvd.init()
    here = hvd.rank() + 1.0
    in_tensorflow = hvd.allreduce(tf.fill([3], here), op=hvd.Sum, compression=Halved).numpy().tolist()
    in_graph = tf.function(lambda: hvd.reducescatter(tf.fill([4], here), op=hvd.Sum, compression=Halved))()
    in_torch = on_torch.allreduce(torch.full((3,), here), op=hvd.Sum, compression=Halved).tolist()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = on_torch.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Halved, op=hvd.Sum)
    (weight * here).sum().backward()
    optimizer.step()
    variable = tf.Variable([1.0, 1.0])
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, compression=Halved) as tape:
        loss = tf.reduce_sum(variable * here)
    gradient = tape.gradient(loss, [variable])[0]
    return in_tensorflow, in_graph.numpy().tolist(), in_torch, weight.tolist(), np.asarray(gradient).tolist()


def test_custom_compressor_is_used_by_every_collective():
    for tensorflow, graph, in_torch, weight, gradient in together(with_custom_compressor):
        assert tensorflow == in_torch == [3.0] * 3
        assert graph == [3.0] * 2
        assert weight == [-3.0] * 2
        assert gradient == [3.0] * 2
