"""DistributedOptimizer: what its steps are equal to, and what it refuses."""

from __future__ import annotations

import warnings

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import UsageError
from tests.unit.worlds import together


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * rank + step))


def corners() -> list:
    hvd.init()
    r = hvd.rank()
    out = []

    # one row, several times: what is left of the indices is a single element
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), 0)
    before = embedding.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), op=hvd.Sum)
    embedding(torch.tensor([3, 3])).sum().backward()
    optimizer.step()
    out.append((before - embedding.weight.detach())[:, 0].round().tolist() == [0.0, 0.0, 0.0, 4.0, 0.0, 0.0])

    # parameters of another type, another group, added later
    extra = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
    optimizer.add_param_group({"params": [extra], "lr": 2.0})
    (extra.sum() * r).backward()
    optimizer.step()
    out.append(extra.detach().tolist() == [-1.0] * 3)
    hvd.barrier()
    return out


def test_corner_cases_of_a_step():
    for checks in together(corners):
        assert all(checks), checks


def test_the_wrapped_optimizer_keeps_its_class_and_state(alone):
    model = model_of()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    early = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        late.step()
    early.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.025
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert inner.param_groups is optimizer.param_groups
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    assert calls == [1]


def test_wrong_arguments_are_refused_with_what_to_do(alone):
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for kwargs, words in (
        ({"named_parameters": named[:2]}, "2 of the optimizer's 4 parameters"),
        ({"named_parameters": [named[0]] * 2 + named[1:]}, "more than once"),
        ({"named_parameters": [p for _, p in named]}, "model.named_parameters"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"op": hvd.Adasum}, "Adasum"),
        ({"op": hvd.Max}, "op=hvd.Average or op=hvd.Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=hvd.Average"),
    ):
        with pytest.raises(UsageError, match=words):
            hvd.DistributedOptimizer(sgd, **kwargs)


def carried(dtype: torch.dtype, compression: str, uneven: bool) -> list[list[float]]:
    """What the numbers of each step come to; in the third step there are more of them."""
    hvd.init()
    model = model_of().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, compression=getattr(hvd.Compression, compression), op=hvd.Sum)
    out = []
    for step in range(4):
        numbers = torch.tensor([float(hvd.rank() + 1), 1e6 + step] + [0.5] * (step > 1), dtype=torch.float64)
        optimizer.zero_grad()
        optimizer.attach_scalars(numbers, sums := torch.zeros_like(numbers))
        if not (uneven and hvd.rank()):  # others have no rows
            model(rows_of(hvd.rank(), step).to(dtype)).square().sum().backward()
        optimizer.step()
        out.append(sums.tolist())
    return out


def carried_each(cases: list) -> list[list[list[float]]]:
    return [carried(*case) for case in cases]


CARRIED = [
    (dtype, compression, uneven)
    for dtype, compression in [
        (torch.float64, "none"),
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        (torch.float32, "fp16"),
    ]
    for uneven in (False, True)
]


def test_attached_scalars_are_summed_exactly():
    for results in together(carried_each, CARRIED):
        for case, result in zip(CARRIED, results, strict=True):
            assert result == [[3, 2 * (1e6 + step)] + [1] * (step > 1) for step in range(4)], case


def test_attached_scalars_are_unchanged_in_a_world_of_one(alone):
    assert carried(torch.float32, "none", False)[3] == [1, 1e6 + 3, 0.5]


def one_after_the_other(kept: bool) -> tuple[list[float], str]:
    """Trains one model with two optimizers in turn; kept: the first one is still there meanwhile."""
    hvd.init()
    torch.manual_seed(0)
    model = model_of()
    first = None
    for lr in (0.05, 0.01):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr))
        first = first if kept and first is not None else optimizer
        for step in range(3):
            optimizer.zero_grad()
            model(rows_of(hvd.rank(), step)).square().mean().backward()
            optimizer.step()
    refused = ""
    if kept:
        try:
            first.step()
        except UsageError as error:
            refused = str(error)
    return [float(p.detach().sum()) for p in model.parameters()], refused


def both_ways() -> list[tuple[list[float], str]]:
    return [one_after_the_other(kept) for kept in (False, True)]


@pytest.mark.nightly
def test_a_later_optimizer_takes_over_the_parameters_of_an_earlier_one():
    for dropped, kept in together(both_ways):
        assert kept[0] == dropped[0]
        assert "was made later" in kept[1]


def trained_with_layout(transform) -> bool:
    """Train a convolution whose weight `transform` has laid out; return whether it equals the usual layout's."""
    hvd.init()

    def steps(layout, count: int) -> torch.Tensor:
        torch.manual_seed(3)
        model = torch.nn.Conv2d(3, 4, 2)
        model.weight = torch.nn.Parameter(layout(model.weight.detach()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if count == hvd.size():
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        images = torch.randn(hvd.size(), 3, 5, 5, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            optimizer.zero_grad()
            part = images[hvd.rank() : hvd.rank() + 1] if count == hvd.size() else images
            (model(part).square().sum() / (1 if count == hvd.size() else hvd.size())).backward()
            optimizer.step()
        return model.weight.detach()

    weight, want = steps(transform, hvd.size()), steps(torch.Tensor.contiguous, 1)
    return torch.allclose(weight, want, rtol=1e-5, atol=1e-6)


def in_channels_last(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(memory_format=torch.channels_last)


def with_gaps(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*weight.shape, 2)[..., 0].copy_(weight)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [in_channels_last, with_gaps])
def test_parameters_of_any_memory_layout_are_trained(layout):
    assert together(trained_with_layout, layout) == [True, True]
