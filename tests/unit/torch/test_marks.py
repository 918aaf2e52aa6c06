"""Loops whose changes between two marks are easily missed: a loss leaves no trace of them."""

from __future__ import annotations

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import HorovodInternalError, MismatchError, UsageError
from spark_elastic.torch.elastic import TorchState
from tests.unit.torch.test_collectives import together


@pytest.mark.parametrize("kind", [TorchState, hvd.elastic.ObjectState])
def test_checks_without_an_optimizer_count_as_steps_that_a_loss_takes_back(alone, kind):
    state = kind(n=0)
    lost = []

    @hvd.elastic.run
    def loop(state):
        while state.n < 20:
            if state.n == 15 and not lost:
                lost.append(state.version)
                raise HorovodInternalError("a peer is gone")
            if len(lost) == 1:
                lost.append(state.version)
            state.n += 1
            if state.n == 10:
                state.commit()
            else:
                state.check_host_updates()

    loop(state)
    assert lost[1].steps_lost(lost[0]) == 5


@pytest.mark.parametrize("how", ["skips the step", "skips the mark too", "returns"])
def test_a_loss_that_the_loop_catches_leaves_no_step_out(alone, how):
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    torch.nn.init.zeros_(model.weight)
    state = TorchState(model, optimizer, step=0)
    calls, failed = [], []

    def train(state):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        if state.step >= 3 and (not failed or len(calls) == 1):  # then all fail, until the loop has joined a world
            failed.append(state.step)
            raise HorovodInternalError("a peer is gone")
        optimizer.step()

    @hvd.elastic.run
    def loop(state):
        calls.append(state.step)
        while state.step < 6:
            try:
                train(state)
                if how == "skips the mark too":
                    state.step += 1
                    state.check_host_updates()
            except Exception:
                if how == "skips the mark too":
                    state.step += 1
            finally:
                if how == "returns" and failed and len(calls) == 1:
                    return state.step  # noqa: B012
            if how != "skips the mark too":
                state.step += 1
                state.check_host_updates()
        return state.step

    assert loop(state) == 6
    assert calls == [0, 3]
    assert model.weight.tolist() == [[-6.0, -6.0]]


def test_an_optimizer_that_trains_outside_of_the_state_is_refused(alone):
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @hvd.elastic.run
    def loop(state):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.commit()

    with pytest.raises(UsageError, match=r"TorchState\(model=model, optimizer=optimizer\)"):
        loop(TorchState(model, step=0))
    loop(TorchState(model, optimizer, step=0))


def unwrapped(averaged: bool) -> str:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    @hvd.elastic.run
    def loop(state):
        while state.step < 3:
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
            if averaged:
                hvd.grouped_allreduce_([param.grad for param in model.parameters()])
            optimizer.step()
            state.step += 1
            state.check_host_updates()
        return "equal"

    try:
        return loop(TorchState(model, optimizer, step=0))
    except MismatchError as error:
        return str(error)


def test_replicas_that_drift_apart_are_noticed_at_the_first_mark():
    for error in together(unwrapped, 2, args=(False,)):
        assert "model.weight" in error
        assert "hvd.DistributedOptimizer" in error
    assert together(unwrapped, 2, args=(True,)) == ["equal"] * 2


def test_models_in_a_collection_are_refused(alone):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for values in ([model], {"first": optimizer}, (0, scheduler)):
        with pytest.raises(UsageError, match="a keyword argument of its own"):
            TorchState(values=values)
    TorchState(values=[1, "x", {"weights": torch.ones(2)}])
