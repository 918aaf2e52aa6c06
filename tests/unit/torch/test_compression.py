"""Gradients of 16 bits, added up over many members: what is small must not vanish, what is large not overflow."""

from __future__ import annotations

import math

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.fused import Bucket
from spark_elastic.collective.operators import Average, Compression, Sum
from tests.unit.worlds import together


class Alike:
    """A group of `size` members that all send the same, added up one after the other in the type that is sent."""

    def __init__(self, size: int) -> None:
        self.size = size

    def allreduce(self, tensor, op, fill=None):
        if fill is not None:
            fill(tensor, 0)
        one = tensor.clone()
        for _ in range(self.size - 1):
            tensor.add_(one)


def reduced(gradient, size: int, compression, op=Average, predivide: float = 1.0):
    bucket = Bucket([gradient], compression, flags=0)
    bucket.scale(op, predivide, size)
    bucket.send(Alike(size), op.gloo, [gradient])
    bucket.unpack()
    return bucket.views[0] * bucket.after


SIZES = [1, 3, 64, 1024]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", [torch.float32, torch.float16], ids=["compressed", "a model of float16"])
def test_averages_of_float16_keep_small_and_large_gradients(size, model):
    values = torch.tensor([1e-6, -1e-6, 3e-5, 1e-3, 1.0, 1000.0, -2000.0], dtype=model)
    got = reduced(values, size, Compression.fp16 if model is torch.float32 else Compression.none)
    off = (got.double() - values.double()).abs() / values.double().abs()
    # they are sent in units of 6e-8: of 1,024 members each sends half of one, which is rounded; nothing would be 1.0
    assert off[:2].max() < (0.4 if size <= 100 else 0.95)
    assert off[2:].max() < 0.02 + size * 2**-12
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("size", SIZES)
def test_an_infinite_gradient_stays_infinite_and_nan_stays_nan(size):
    got = reduced(torch.tensor([math.inf, -math.inf, math.nan, 1e30, 1.0]), size, Compression.fp16)
    assert got[:2].tolist() == [math.inf, -math.inf]
    assert got[2].isnan()
    assert got[3].isinf()  # larger than float16 can hold: seen, not clipped
    assert got[4].item() == 1.0


@pytest.mark.parametrize("size", SIZES)
def test_averages_of_bfloat16_have_the_range_of_float32(size):
    values = torch.tensor([1e-30, 1e-6, 1.0, 1e30])
    got = reduced(values, size, Compression.bf16)
    assert ((got - values).abs() / values).max() < 0.02 + size * 2**-8


def test_sums_and_predivided_averages_of_float16_keep_their_factors():
    values = torch.tensor([1.0, 3.0])
    assert reduced(values, 64, Compression.fp16, op=Sum).tolist() == [64.0, 192.0]
    assert reduced(values, 64, Compression.fp16, predivide=64.0).tolist() == [1.0, 3.0]
    assert reduced(torch.tensor([4000.0]), 64, Compression.fp16, op=Sum).item() == pytest.approx(256_000.0, rel=0.01)


def compressed_calls():
    hvd.init()
    small, large = torch.tensor([1e-6]), torch.tensor([40_000.0])
    half = hvd.Compression.fp16
    whole = torch.tensor([hvd.rank(), 3])
    mixed = hvd.grouped_allreduce([small, whole], compression=half)
    scattered = hvd.reducescatter(large.repeat(4), compression=half, op=hvd.Average)
    x = torch.tensor([2.0], requires_grad=True)
    hvd.allreduce(x, compression=half).backward()
    return (
        hvd.allreduce(small, compression=half).item(),
        hvd.allreduce(torch.tensor([7000.0]), compression=half, op=hvd.Sum).item(),
        mixed[0].item(),
        mixed[1].tolist(),
        scattered[0].item(),
        x.grad.item(),
    )


def test_compressed_collectives_keep_small_and_large_values():
    for small, total, mixed, whole, scattered, gradient in together(compressed_calls, count=4):
        assert small == pytest.approx(1e-6, rel=0.1)
        assert total == 28_000.0
        assert mixed == pytest.approx(1e-6, rel=0.1)
        assert whole == [1, 3]
        assert scattered == 40_000.0
        assert gradient == 1.0
