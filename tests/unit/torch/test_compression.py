"""Gradients of 16 bits, added up over many members: what is small must not vanish, what is large not overflow."""

from __future__ import annotations

import math

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.fused import Bucket, FusedReduction
from spark_elastic.collective.reduction import Average, Compression, Max, Sum, compressed_sum_scaling
from spark_elastic.elastic.loop import frontend
from tests.unit.torch.test_collectives import together


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
    bucket = Bucket([gradient], compression, flagged=False)
    bucket.scale(op, predivide, size)
    bucket.send(Alike(size), op.gloo, [gradient])
    bucket.unpack()
    return bucket.views[0] * bucket.after


SIZES = [1, 2, 3, 8, 64, 100, 1024]


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


UNEVEN = torch.tensor([1 + 2**-10, 3e-5 * (1 + 2**-11), -(1 + 3 * 2**-10)])
"""Numbers that bfloat16 rounds down in each step: after 1,000 steps their sum lacks one part in a thousand."""


def summed(bucket: Bucket, gradients, size: int = 2) -> torch.Tensor:
    """Return the float64 sum of what arrives of these gradients, one a step."""
    bucket.scale(Average, 1.0, size)
    total = torch.zeros(len(gradients[0]), dtype=torch.float64)
    for gradient in gradients:
        bucket.send(Alike(size), Average.gloo, [gradient])
        bucket.unpack()
        total += bucket.flat[: len(gradient)] * bucket.after
    return total


@pytest.mark.parametrize("size", [2, 4])
def test_error_feedback_delivers_in_later_steps_what_rounding_took_off(size):
    steps = 1000
    without = summed(Bucket([UNEVEN], Compression.bf16, flagged=True), [UNEVEN] * steps, size)
    fed_back = summed(Bucket([UNEVEN], Compression.bf16_error_feedback, flagged=True), [UNEVEN] * steps, size)
    exact = UNEVEN.double() * steps
    assert ((without - exact) / exact).abs().min() > 4e-4
    assert ((fed_back - exact) / UNEVEN.double()).abs().max() < 2**-7  # one rounding of one step


def test_an_infinite_gradient_leaves_nothing_in_the_error():
    odd = torch.tensor([math.inf, math.nan, 3.4e38])  # the last one is rounded up, to infinity
    bucket = Bucket([odd], Compression.bf16_error_feedback, flagged=False)
    summed(bucket, [odd], size=1)
    assert summed(bucket, [torch.ones(3)] * 2).tolist() == [2, 2, 2]


def test_error_feedback_begins_anew_after_it_was_forgotten():
    bucket = Bucket([UNEVEN], Compression.bf16_error_feedback, flagged=False)
    first = summed(bucket, [UNEVEN] * 3)
    bucket.forget_error()
    assert summed(bucket, [UNEVEN] * 3).tolist() == first.tolist()


def test_values_that_are_not_rounded_have_no_error():
    for dtype, is_rounded in ((torch.float64, True), (torch.float16, True), (torch.bfloat16, False)):
        gradient = torch.full((3,), 1 + 2**-10, dtype=dtype)
        bucket = Bucket([gradient], Compression.bf16_error_feedback, flagged=False)
        assert (bucket.error is not None) == is_rounded
        if is_rounded:
            assert summed(bucket, [gradient] * 1024).tolist() == pytest.approx([1025.0] * 3, abs=2**-7)


def test_a_parameter_without_a_gradient_does_not_move_and_keeps_its_error():
    gradients = [UNEVEN, torch.ones(2)]
    bucket = Bucket(gradients, Compression.bf16_error_feedback, flagged=True)
    bucket.scale(Average, 1.0, 2)
    received = torch.zeros(3, dtype=torch.float64)
    for step in range(100):
        bucket.send(Alike(2), Average.gloo, [UNEVEN if step % 2 else None, gradients[1]])
        bucket.unpack()
        if step % 2:
            received += bucket.views[0]
        else:
            assert bucket.views[0].tolist() == [0, 0, 0]
        assert bucket.views[1].tolist() == [1, 1]
    assert ((received - 50 * UNEVEN.double()) / UNEVEN.double()).abs().max() < 2**-7


def arrived(*gradients) -> list[list[float]]:
    """Return what arrives of a parameter's gradients in steps with error feedback."""
    bucket = Bucket([torch.tensor(gradients[0])], Compression.bf16_error_feedback, flagged=False)
    bucket.scale(Average, 1.0, 2)
    out = []
    for gradient in gradients:
        bucket.send(Alike(2), Average.gloo, [torch.tensor(gradient)])
        bucket.unpack()
        out.append((bucket.views[0] * bucket.after).tolist())
    return out


@pytest.mark.parametrize("huge", [1e6 + 300, 1e20 * 1.001, 3e38])
def test_a_huge_gradient_that_was_skipped_or_clipped_leaves_no_trace_in_later_steps(huge):
    _, *later = arrived([huge, -huge], *[[1.0, 1.0]] * 3)
    assert [each for step in later for each in step] == pytest.approx([1.0] * 6, abs=2**-7)


def test_a_gradient_of_zero_is_sent_as_zero():
    assert arrived([1 + 2**-10, 1.0], [0.0, 1.0], [0.0, 1.0])[1:] == [[0, 1], [0, 1]]


def embedded() -> list[float]:
    hvd.init()
    table = torch.nn.Embedding(3, 1, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=Compression.bf16_error_feedback, sparse_as_dense=True)
    for row in (0, 1, 1):
        optimizer.zero_grad()
        (table(torch.tensor([row])) * (1 + 2**-10)).sum().backward()
        optimizer.step()
    return table.weight.detach().view(-1).tolist()


def test_rows_of_an_embedding_that_are_not_in_the_batch_stay_where_they_are():
    assert together(embedded, 2) == [[-1, -2, 0]] * 2


def over_two_worlds(scalars: tuple[int, ...]) -> list[list[float]]:
    """Return what arrives of equal gradients in two steps of one world, then in two of the next."""
    hvd.init()
    value = torch.tensor([1 + 3 * 2**-10])  # rounded to 1, and with its error to 1 + 2**-7
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=Compression.bf16_error_feedback)
    fused = FusedReduction(compression=Compression.bf16_error_feedback)
    of_optimizer, of_fused = [], []
    for world in range(2):
        for step in range(2):
            optimizer.zero_grad()
            if scalars:
                optimizer.attach_scalars(torch.ones(scalars[step], dtype=torch.float64))
            (param * value).sum().backward()
            optimizer.step()
            of_optimizer.append(param.grad.item())
            numbers = torch.ones(scalars[step], dtype=torch.float64) if scalars else None
            of_fused.append(fused([value], numbers)[0].item())
        if world == 0:
            frontend.rejoin(0)
    return [of_optimizer, of_fused]


@pytest.mark.parametrize("scalars", [(), (1, 2)], ids=["gradients alone", "numbers in another number each step"])
def test_error_feedback_begins_anew_in_another_world_and_only_there(scalars):
    steps = [1, 1 + 2**-7] * 2
    assert together(over_two_worlds, 2, args=(scalars,)) == [[steps, steps]] * 2


def descended(compression: str) -> list[float]:
    """Return weights after 600 steps down the same gradients, and others after 600 more with a lost step between."""
    hvd.init()
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2.0**-10), compression=getattr(hvd.Compression, compression)
    )
    out = []
    for half in range(2):
        for _ in range(600):
            optimizer.zero_grad()
            model(UNEVEN.abs()[None]).sum().backward()
            optimizer.step()
        out += model.weight[0].tolist()
        if half == 0:
            model(torch.full((1, 3), 1e6)).sum().backward()
            optimizer._reducer.abandon()  # as after the loss of a peer
    return out


def descended_each() -> list[list[float]]:
    return [descended(compression) for compression in ("none", "bf16", "bf16_error_feedback")]


def test_an_optimizer_with_error_feedback_goes_as_far_as_one_without_compression():
    for exact, rounded, fed_back in together(descended_each, 2):
        off = [[abs(b / a - 1) for a, b in zip(exact, other, strict=True)] for other in (rounded, fed_back)]
        assert min(off[0]) > 4e-4
        assert max(off[1]) < 3e-5


def test_sums_and_predivided_averages_of_float16_keep_their_factors():
    values = torch.tensor([1.0, 3.0])
    assert reduced(values, 64, Compression.fp16, op=Sum).tolist() == [64.0, 192.0]
    assert reduced(values, 64, Compression.fp16, predivide=64.0).tolist() == [1.0, 3.0]
    assert reduced(torch.tensor([4000.0]), 64, Compression.fp16, op=Sum).item() == pytest.approx(256_000.0, rel=0.01)


def test_factors_around_a_compressed_sum_cancel_out():
    for size in range(2, 3000):
        operator, before, after = compressed_sum_scaling(Compression.fp16, Average, size, torch.float32)
        assert operator is Sum
        assert before * after * size == pytest.approx(1.0)
        assert 0.5 <= before * math.sqrt(size) <= 2
    assert compressed_sum_scaling(Compression.fp16, Max, 64, torch.float32) == (Max, 1.0, 1.0)
    assert compressed_sum_scaling(Compression.fp16, Average, 64, torch.int64) == (Average, 1.0, 1.0)
    assert compressed_sum_scaling(Compression.bf16, Average, 64, torch.float32) == (Average, 1.0, 1.0)


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
    for small, total, mixed, whole, scattered, gradient in together(compressed_calls, 4):
        assert small == pytest.approx(1e-6, rel=0.1)
        assert total == 28_000.0
        assert mixed == pytest.approx(1e-6, rel=0.1)
        assert whole == [1, 3]
        assert scattered == 40_000.0
        assert gradient == 1.0
