"""TorchState: what it copies, puts back and takes over."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic import clock
from spark_elastic.collective.digest import digest
from spark_elastic.elastic.handlers import TensorSpec
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.torch.elastic import StateHandler, TorchState, get_handler_registry, register_handler
from tests.unit.worlds import together


def stepped(model, optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


def values(model) -> list:
    return [round(v.double().sum().item(), 6) for v in model.state_dict().values()]


def test_restore_returns_models_optimizers_schedulers_and_values_to_the_last_save(alone):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    other = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    second = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = TorchState(
        model,
        optimizer,
        other=other,
        second=second,
        scheduler=scheduler,
        sampler=hvd.elastic.ElasticSampler([1, 2]),
        n=0,
    )
    stepped(model, optimizer)
    stepped(other, second)
    state.n = 1
    state.commit()
    want = values(model), values(other)
    steps = [s["step"].item() for s in optimizer.state.values()]
    stepped(model, optimizer, 3)
    stepped(other, second, 2)
    scheduler.step()
    state.sampler.record_batch(0, 1)
    state.n = 7
    state.restore()
    assert (values(model), values(other)) == want
    assert [s["step"].item() for s in optimizer.state.values()] == steps
    assert (state.n, optimizer.param_groups[0]["lr"]) == (1, 0.1)
    assert (scheduler.last_epoch, state.sampler.processed_num) == (0, 0)


class Counter:
    def __init__(self, value):
        self.value = value


class CounterHandler(StateHandler):
    def light(self):
        return self.value.value

    def set_light(self, light):
        self.value.value = light


def test_the_registry_can_be_extended(alone):
    register_handler(Counter, CounterHandler)
    try:
        state = TorchState(counter=Counter(3))
        state.counter.value = 4
        state.restore()
        assert state.counter.value == 3
    finally:
        get_handler_registry().pop(0)


class HorovodsHandler(StateHandler):
    def save(self):
        self.saved = self.value.value

    def restore(self):
        self.value.value = self.saved

    def sync(self):
        self.value.value = hvd.broadcast_object(self.value.value)


class TensorHandler(StateHandler):
    """The value is a tensor of one element."""

    def layout(self):
        return [TensorSpec("value", (), torch.float32, True)]

    def tensors(self, layout):
        if not isinstance(self.value.value, torch.Tensor):
            self.value.value = torch.tensor(float(self.value.value))
        return [self.value.value]


@pytest.mark.nightly
@pytest.mark.parametrize(("commit_every", "checks"), [(1, False), (3, True), (3, False)])
@pytest.mark.parametrize("kind", [CounterHandler, HorovodsHandler, TensorHandler])
def test_values_of_users_own_handlers_are_undone_with_the_step(alone, kind, commit_every, checks):
    register_handler(Counter, kind)
    try:
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        state = TorchState(model, optimizer, n=0, counter=Counter(0))
    finally:
        get_handler_registry().pop(0)
    reduce, calls = optimizer._reducer._complete, []

    def finish():
        calls.append(1)
        if len(calls) == 5:
            raise HorovodInternalError("a peer is gone")
        reduce()

    optimizer._reducer._complete = finish

    @hvd.elastic.run
    def loop(state):
        while state.n < 6:
            state.counter.value += 1
            stepped(model, optimizer)
            state.n += 1
            if state.n % commit_every == 0:
                state.commit()
            elif checks:
                state.check_host_updates()

    loop(state)
    assert (state.n, int(state.counter.value)) == (6, 6)


def different_models():
    hvd.init()
    state = TorchState(torch.nn.Linear(2, 2 + hvd.rank()))
    try:
        state.sync()
    except UsageError as error:
        return str(error)
    return "root"


def test_a_model_that_differs_from_the_roots_is_named():
    (answer,) = together(different_models, left=1)  # the root waits; its driver ends it when a function has raised
    assert "weight is (2, 2) torch.float32 there, and (3, 2)" in answer


def test_a_newcomers_initial_state_can_be_broadcast_without_a_state():
    first, second = together(broadcast_optimizers)
    assert first == second


def broadcast_optimizers():
    hvd.init()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        stepped(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return values(model), optimizer.param_groups[0]["lr"], [float(s["exp_avg"].sum()) for s in optimizer.state.values()]


def zeros_before_the_first_step(root_has_stepped):
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=not root_has_stepped), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if root_has_stepped and hvd.rank() == 0:
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    grads = [None if p.grad is None else float(p.grad.to_dense().abs().sum()) for p in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(torch.tensor([1])).sum().backward()
    return grads, model[0].weight.grad.is_sparse, values(model)


@pytest.mark.parametrize("root_has_stepped", [False, True])
def test_gradients_are_zeros_after_the_broadcast_of_an_optimizer_that_never_stepped(root_has_stepped):
    first, second = together(partial(zeros_before_the_first_step, root_has_stepped))
    assert first == second
    assert first[0] == ([None] * 3 if root_has_stepped else [0.0, 0.0, None])
    assert first[1] is not root_has_stepped, "gradients of the embedding stay sparse"


def test_gradients_of_the_world_before_are_not_added_to(alone):
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = TorchState(model, optimizer, n=0)

    @hvd.elastic.run
    def loop(state):
        stale = model.weight.grad
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state.n += 1
        if state.n == 1:
            state.mark_here()
            raise hvd.HostsUpdatedInterrupt
        return stale

    assert loop(state) is None


@pytest.mark.nightly
def test_a_commit_is_a_snapshot_whatever_changes_the_tensors_afterwards(alone):
    model, average = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = TorchState(model, optimizer, average=average, n=0)
    seen = []

    @hvd.elastic.run
    def loop(state):
        seen.append((values(model), values(average), state.n, state.version))
        if len(seen) == 1:
            stepped(model, optimizer)
            state.n += 1
            average.weight.data.mul_(3.0)
            state.commit()
            seen[0] = values(model), values(average), state.n, state.version
            average.weight.data.mul_(3.0)
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            raise HorovodInternalError("a collective of the loop's own")

    loop(state)
    assert seen[1] == seen[0]


def test_a_loop_that_always_commits_between_backward_and_step_is_refused(alone):
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = TorchState(model, optimizer, n=0)

    @hvd.elastic.run
    def loop(state):
        while state.n < 9:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            state.n += 1
            state.commit()
            optimizer.step()

    with pytest.raises(UsageError, match=r"call them after optimizer\.step"):
        loop(state)
    assert state.n == 3


def bring_a_strided_element():
    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False)
    model.register_buffer("scale", torch.full((1, 8), float(hvd.rank()))[:, 0])  # one element, of stride 8
    state = hvd.elastic.TorchState(model=model)
    hvd.elastic.run(lambda state: None)(state)
    assert digest(model.scale) == digest(torch.zeros(1))
    column = torch.zeros(1, 2).t()[:1] + hvd.rank()
    return model.scale.item(), hvd.allgather(column.t()).tolist()


@pytest.mark.nightly
def test_a_single_element_may_have_any_stride():
    assert together(bring_a_strided_element) == [(0.0, [[0.0], [1.0]])] * 2


@pytest.mark.parametrize("kind", [TorchState, hvd.elastic.ObjectState])
@pytest.mark.parametrize("name", ["progress", "commit", "_counter"])
def test_a_value_with_a_name_that_the_state_uses_is_refused(kind, name):
    with pytest.raises(UsageError, match=f"^{name} cannot be the name.*check_host_updates, commit"):
        kind(**{name: 0})


class Slow:
    """Takes two seconds to copy."""

    def __init__(self, now):
        self.now = now

    def __deepcopy__(self, memo):
        self.now[0] += 2.0
        return self


@pytest.mark.parametrize("kind", [TorchState, hvd.elastic.ObjectState])
def test_a_value_that_takes_long_to_copy_is_named_once(alone, kind, monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    state = kind(step=0, table=Slow(now))
    for _ in range(3):
        state.commit()
    said = [record.getMessage() for record in caplog.records if "to copy" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("table of the state, a Slow, takes 2.0 s to copy")


def send_a_lock(kind):
    hvd.init()
    state = kind(step=0, guard=threading.Lock())
    try:
        hvd.elastic.run(lambda state: None)(state)
    except UsageError as error:
        return str(error)
    return "received"


@pytest.mark.parametrize("kind", [TorchState, hvd.elastic.ObjectState])
def test_a_value_that_cannot_be_sent_is_named(kind):
    (answer,) = together(
        send_a_lock, kind, left=1
    )  # the other one waits; its driver ends it when a function has raised
    assert answer.startswith("guard cannot be kept by the state: a lock cannot be pickled")
