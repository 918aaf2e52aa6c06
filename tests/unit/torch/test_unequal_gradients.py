"""Ranks whose gradients do not belong together get an error and no sum; what cannot be reduced is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import MismatchError, UsageError
from tests.unit.torch.test_final_gradients import loss_of, model_of, rows
from tests.unit.worlds import together

# --- members that differ --------------------------------------------------------------------------


def unequal() -> str:
    hvd.init()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step in range(3):
            optimizer.zero_grad()
            for _ in range(1 + (step == 1 and hvd.rank() == 1)):
                loss_of(model, step).backward()
            optimizer.step()
    except MismatchError as error:
        return str(error)
    return ""


def test_ranks_with_unequal_backwards_get_an_error_and_no_sum():
    for error in together(unequal):
        assert "different steps" in error


def crossed() -> str:
    hvd.init()
    a, b = model_of(), model_of()
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (a, b)]
    for model in (a, b):
        loss_of(model, 0).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    try:
        loss_of((a, b)[hvd.rank()], 1).backward()
    except MismatchError as error:
        return str(error)
    return ""


def test_gradients_of_different_optimizers_are_never_summed():
    for error in together(crossed):
        assert "DistributedOptimizer" in error


# --- what is refused --------------------------------------------------------------------------------


def test_a_backward_that_keeps_its_graph_is_refused(alone):
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="create_graph"), pytest.warns(UserWarning, match="create_graph"):
        loss_of(model, 0).backward(create_graph=True)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()


def test_a_step_within_backward_is_refused(alone):
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hidden = model[0](rows(0))
    hidden.register_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match="within backward"):
        model[2](hidden).sum().backward()


def stepped(model: torch.nn.Module, optimizer: Any, step: int, dtype: torch.dtype = torch.float32) -> None:
    model.zero_grad()
    model(rows(step).to(dtype)).square().mean().backward()
    optimizer.step()


def refusals() -> list[str]:
    hvd.init()
    found = []

    def refused(function: Any) -> None:
        with pytest.raises(UsageError) as error:
            function()
        found.append(str(error.value))

    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=4)
    stepped(model, optimizer, 0)
    hidden = model[0](rows(1))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[2](hidden).sum().backward()
    refused(lambda: stepped(model, optimizer, 1))
    optimizer.detach()

    refused(lambda: hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.LazyLinear(2).parameters(), lr=0.1)))
    for op in (hvd.Average, hvd.Sum):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
        stepped(model, optimizer, 0)
        model.double()
        refused(lambda model=model, optimizer=optimizer: stepped(model, optimizer, 1, torch.float64))

    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.ones(7, 5)
    refused(optimizer.step)

    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].bias = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(7))
    refused(lambda: stepped(model, optimizer, 0))
    return found


def test_what_cannot_be_reduced_is_refused():
    words = ["cannot be skipped", "lazy module", "type or device", "type or device", "does not require", "param_groups"]
    for found in together(refusals):
        assert [word for word, message in zip(words, found, strict=True) if word not in message] == []
