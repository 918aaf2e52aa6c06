"""Loops whose changes between two marks are easily missed: a loss leaves no trace of them."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import HorovodInternalError, MismatchError
from spark_elastic.helper_thread import HelperThread
from spark_elastic.torch.elastic import TorchState
from tests.unit.worlds import together


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


class Alias(torch.nn.Module):
    """Keeps the rows of its last batch in a buffer, and all rows so far in another."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1, bias=False)
        self.register_buffer("last", None)
        self.register_buffer("seen", torch.zeros(0, 3))

    def forward(self, rows):
        self.last, self.seen = rows, torch.cat([self.seen, rows])
        return self.inner(rows)


class Counting(torch.optim.SGD):
    """Counts its steps in a place that belongs to no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.param_groups[0]["lr"] = 0.01 / self.state["steps"]
        return super().step(closure)


class Losses:
    total = 0.0

    def __init__(self):
        self.all = []

    def add(self, loss):
        self.total = self.total + loss
        self.all.append(loss)


def loop_that_fails(kind, fails):
    """Train 8 steps with checks and one commit; fail once at step 5, in the middle of it or right after it."""
    torch.manual_seed(0)
    data = torch.arange(72.0).reshape(8, 3, 3) / 72
    data_before = data.clone()
    average = torch.nn.Linear(3, 1, bias=False)
    model = torch.nn.ModuleDict({"net": Alias() if kind == "buffers" else torch.nn.Linear(3, 1), "average": average})
    if kind == "unfreezing":
        model["net"].requires_grad_(False)
    plain = Counting(model.parameters(), 0.01) if kind == "counting" else torch.optim.SGD(model.parameters(), 0.01)
    bare = kind in ("counting", "unfreezing")
    optimizer = plain if bare else hvd.DistributedOptimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=kind == "scaling")
    kept = plain if kind == "inner optimizer" else optimizer
    state = TorchState(model, kept, scaler=scaler, losses=Losses(), step=0)
    failed, modes = [not fails], []

    def fail():
        if not failed[0] and state.step == 5:
            failed[0] = True
            raise HorovodInternalError("a peer is gone")

    @hvd.elastic.run
    def loop(state):
        while state.step < 8:
            modes.append(model.training)
            if kind == "replacing" and state.step == 4:
                model["average"] = torch.nn.Linear(3, 1, bias=False)
                torch.nn.init.ones_(model["average"].weight)
            if kind == "replacing":
                with torch.no_grad():
                    model["average"].weight.mul_(0.5)
            if kind == "unfreezing" and state.step == 4:
                model["net"].requires_grad_(True)
            if kind == "replacing":
                fail()
            optimizer.zero_grad()
            loss = (model["net"](data[state.step]) + model["average"](data[state.step])).square().mean()
            state.losses.add(loss if kind == "losses" else loss.item())
            scaler.scale(loss).backward()
            if kind.endswith("optimizer"):
                fail()
            if not bare:
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            if kind in ("scaling", "buffers", "losses"):
                fail()
            with optimizer.skip_synchronize() if not bare else nullcontext():
                scaler.step(optimizer)
            scaler.update()
            if kind in ("counting", "unfreezing"):
                fail()
            model.eval()
            if kind == "evaluating":
                fail()
            model.train()
            state.step += 1
            if state.step == 3:
                state.commit()
            else:
                state.check_host_updates()

    loop(state)
    assert torch.equal(data, data_before)
    assert failed == [True]
    return (
        [value.tolist() for value in model.state_dict().values()],
        [float(torch.as_tensor(loss).detach()) for loss in (state.losses.total, *state.losses.all)],
        optimizer.state.get("steps"),
        set(modes),
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind",
    [
        "buffers",
        "losses",
        "replacing",
        "unfreezing",
        "counting",
        "scaling",
        "evaluating",
        "no-optimizer",
        "inner-optimizer",
    ],
)
def test_a_loss_leaves_no_trace_in_what_a_loop_changes(alone, kind):
    kind = kind.replace("-", " ")
    assert loop_that_fails(kind, True) == loop_that_fails(kind, False)


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


@pytest.mark.parametrize(("thread", "returns"), [(HelperThread, 0), (threading.Thread, 1)])
def test_late_error_of_the_packages_own_threads_fails_no_mark(alone, thread, returns):
    state, calls = TorchState(torch.nn.Linear(2, 1), step=0), []

    @hvd.elastic.run
    def loop(state):
        calls.append(state.step)
        while state.step < 4:
            state.step += 1
            if state.step == 2 and len(calls) == 1:  # one that connected the world before, which had broken
                late = thread(target=HorovodInternalError, args=("a peer is gone",), name="late")
                late.start()
                late.join()
            state.check_host_updates()

    loop(state)
    assert len(calls) == 1 + returns


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
    for error in together(unwrapped, False):
        assert "model.weight" in error
        assert "hvd.DistributedOptimizer" in error
    assert together(unwrapped, True) == ["equal"] * 2


def unfrozen():
    """Unfreeze one layer and then another, which rank 0 has tried before."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[:2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(6):
        if step == 2:
            model[1].requires_grad_(True)
            if hvd.rank() == 0:
                model[0].requires_grad_(True)
                optimizer.zero_grad()
                model[0].requires_grad_(False)
        if step == 4:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + hvd.rank())).square().mean().backward()
        optimizer.step()
    return [param.tolist() for param in model.parameters()]


@pytest.mark.nightly
def test_parameters_that_a_loop_unfreezes_are_equal_on_all_members():
    one, other = together(unfrozen)
    assert one == other


@pytest.mark.nightly
@pytest.mark.parametrize("skips", [False, True], ids=["a loss after unscaling", "steps that the scaler skips"])
def test_a_scaler_outside_the_state_does_not_hold_up_the_marks(alone, skips):
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = TorchState(model, optimizer, step=0)
    lost = [1] if skips else []

    @hvd.elastic.run
    def loop(state):
        while state.step < 6:
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 3), float("inf") if skips else 1.0)).square().mean()).backward()
            if not skips:
                scaler.unscale_(optimizer)
            if state.step == 1 and not lost:
                lost.append(state.step)
                raise HorovodInternalError("a peer is gone")
            scaler.step(optimizer)
            scaler.update()
            state.step += 1
            (state.commit if skips else state.check_host_updates)()

    loop(state)
    assert (state.step, lost) == (6, [1])
