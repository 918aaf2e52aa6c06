"""What optimizers, modules and metrics keep outside of their parameters outlives a loss, and reaches newcomers."""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import UsageError
from spark_elastic.torch.elastic import TorchState
from tests.simulation import hidden_values
from tests.simulation.hidden_values import Average
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import joined, together

STEPS = 9
LOST_AT = 5
JOIN_AT = 4


class Lookahead(hidden_values.Lookahead):
    def zero_grad(self):  # without torch's argument
        self.base.zero_grad()


class Signs(hidden_values.Signs):
    """Also has values of other kinds, by which it steps."""

    def __init__(self, params):
        super().__init__(params)
        self.recent, self.noise, self.scales = deque(maxlen=2), np.random.default_rng(0), np.ones(2)

    def step(self, closure=None):
        self.recent.append(self._count)
        self.scales *= 1 + self.noise.random() / 10
        self.param_groups[0]["lr"] = float(self.scales[0]) / (10 + sum(self.recent))
        return super().step(closure)


class Turns(torch.optim.Optimizer):
    """Has a list of optimizers, which step in turn."""

    def __init__(self, optimizers):
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})
        self.optimizers, self.steps = optimizers, 0

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizers[self.steps % len(self.optimizers)].step()
        self.steps += 1


class Remembering(hidden_values.Remembering):
    """Also has a buffer whose elements are one."""

    def __init__(self):
        super().__init__(3)
        self.register_buffer("offsets", torch.zeros(()).expand(3))

    def forward(self, rows):
        return super().forward(rows + self.offsets)


def skip(state):
    pass


def train(kind: str, step_begins: Any = skip) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Remembering() if kind == "buffers" else torch.nn.Linear(3, 1)
    temperature = torch.nn.Parameter(torch.ones(()))
    params = [*model.parameters(), *([temperature] if kind == "temperature" else [])]
    optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if kind == "optimizer within":
        optimizer = Lookahead(torch.optim.Adam(params, lr=0.1))
    if kind == "optimizer":
        optimizer = Signs(params)
    if kind == "optimizers within":
        optimizer = Turns([torch.optim.Adam(params[:1], lr=0.1), torch.optim.SGD(params[1:], lr=0.1, momentum=0.9)])
    optimizer = hvd.DistributedOptimizer(optimizer)
    if kind == "optimizer around":
        optimizer = Lookahead(optimizer)
    metric = Average()
    more = {"temperature": {"temperature": temperature}, "metric": {"metric": metric}, "buffers": {}}.get(kind, {})
    state = TorchState(model, optimizer, losses=[], step=0, **more)

    @hvd.elastic.run
    def loop(state):
        while state.step < STEPS:
            step_begins(state)
            optimizer.zero_grad()
            rows = torch.full((2, 3), 1.0 + state.step)
            loss = ((model(rows) * temperature - 1) / 10).square().mean()
            if kind == "metric":
                metric.update(loss.detach())
                loss = loss * metric.compute()
            loss.backward()
            optimizer.step()
            if kind == "attribute" and not hasattr(state, "best"):
                state.best = []
            (state.best if kind == "attribute" else state.losses).append(loss.item())
            state.step += 1
            if state.step == 3:
                state.commit()
            else:
                state.check_host_updates()

    loop(state)
    assert kind != "temperature" or state.temperature is temperature
    return {
        "model": [value.tolist() for value in model.parameters()],
        "temperature": temperature.item(),
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
        "counts": (getattr(model, "calls", 0), getattr(optimizer, "_count", 0), getattr(optimizer, "steps", 0)),
        "losses": state.best if kind == "attribute" else state.losses,
        "metric": (metric.total.item(), len(metric.all), metric._update_count),
    }


KINDS = [
    "optimizer within",
    "optimizers within",
    "optimizer around",
    "optimizer",
    "metric",
    "buffers",
    "temperature",
    "attribute",
]


def train_with_a_newcomer(kind: str) -> dict[str, Any]:
    def wait_for_newcomer(state):
        tell("in loop")
        while state.step == JOIN_AT and hvd.size() == 2:
            state.check_host_updates()
            time.sleep(0.001)

    hvd.init()
    return train(kind, wait_for_newcomer)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_newcomer_ends_with_the_values_of_one_process(alone, kind):
    expected = train(kind)
    results = joined(train_with_a_newcomer, kind)
    for result in results:
        assert result["counts"] == expected["counts"]
        assert result["buffers"] == expected["buffers"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert result["metric"] == pytest.approx(expected["metric"], rel=1e-3)
        assert result["temperature"] == pytest.approx(expected["temperature"], rel=1e-3)
        assert result["model"] == results[0]["model"]


def test_object_state_keeps_attributes_that_are_added_later(alone):
    state = hvd.elastic.ObjectState(step=0)
    state.best = [1]
    state.commit()
    state.best.append(2)
    state.last = 3
    state.restore()
    assert state.best == [1]
    assert not hasattr(state, "last")
    state._own = open  # names with an underscore are not kept
    state.restore()
    assert state._own is open


def test_attributes_that_cannot_be_kept_are_refused_by_name(alone):
    model = torch.nn.Linear(1, 1)
    state = TorchState(model, target=None, step=0)
    with pytest.raises(UsageError, match=r"threads.*cannot be pickled.*underscore"):
        state.threads = threading.Lock()
    state.average = torch.nn.Linear(1, 1)  # as if it were a keyword argument
    state.save()
    before = state.average.weight.tolist()
    torch.nn.init.ones_(state.average.weight)
    state.restore()
    assert state.average.weight.tolist() == before

    @hvd.elastic.run
    def loop(state):
        for name in ("target", "late"):
            with pytest.raises(UsageError, match=f"{name}.*keyword argument"):
                setattr(state, name, model)

    loop(state)


@pytest.mark.parametrize("kind", [TorchState, hvd.elastic.ObjectState])
def test_a_second_state_within_a_loop_is_refused(alone, kind):
    state, other = kind(step=0), kind(best=0)
    other.commit()

    @hvd.elastic.run
    def loop(state):
        state.commit()
        for mark in (other.commit, other.check_host_updates):
            with pytest.raises(UsageError, match="other than the state of the loop"):
                mark()

    loop(state)
    other.commit()


def test_a_parameter_that_no_value_of_the_state_has_is_refused(alone):
    model, temperature = torch.nn.Linear(1, 1), torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    @hvd.elastic.run
    def loop(state):
        state.commit()

    with pytest.raises(UsageError, match=r"second of the state trains a tensor of shape \(\)"):
        loop(TorchState(model, second=optimizer))
    loop(TorchState(model, second=optimizer, temperature=temperature))


def test_an_optimizer_without_torchs_init_is_refused():
    class Own(torch.optim.SGD):
        def __init__(self, inner):
            self.param_groups, self.state = inner.param_groups, {}

    with pytest.raises(UsageError, match=r"optimizer of the state is a Own.*super\(\)"):
        TorchState(optimizer=Own(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)))


def test_an_optimizer_that_keeps_tensors_by_parameter_itself_is_refused():
    optimizer: Any = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.means = {optimizer.param_groups[0]["params"][0]: torch.zeros(1)}
    with pytest.raises(UsageError, match=r"means of a SGD has parameters and other tensors.*state\[parameter\]"):
        TorchState(optimizer=optimizer)


def test_a_learning_rate_that_is_a_tensor_returns_in_place():
    rate, params = torch.tensor(0.5), [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [param]} for param in params], lr=rate, foreach=False)
    state = TorchState(optimizer=optimizer)
    rate.mul_(2)
    state.restore()
    assert rate == 0.5
    first, second = optimizer.param_groups
    first["lr"], second["lr"] = rate, torch.tensor(0.25)
    state.save()
    second["lr"] = rate  # shared, as in a new optimizer
    state.restore()
    assert (first["lr"], second["lr"]) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("wrap", "named"),
    [(lambda plain: plain, "an optimizer of the state's parameters"), (hvd.DistributedOptimizer, "a Distr")],
)
def test_an_optimizer_of_the_states_parameters_that_is_not_in_it_is_refused(alone, wrap, named):
    model = torch.nn.Linear(1, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))

    @hvd.elastic.run
    def loop(state):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.commit()

    with pytest.raises(UsageError, match=rf"{named}.* \(SGD\) .* not in its state.*\(model=model, optimizer=optimizer"):
        loop(TorchState(model, steps=0))
    loop(TorchState(model, optimizer, steps=0))
    if wrap is not hvd.DistributedOptimizer:
        loop(TorchState(torch.nn.Linear(1, 1), steps=0))  # trains what is not in the state


class Growing(torch.nn.Module):
    """Gets modules in its forward pass: with parameters, or a metric."""

    def __init__(self, make):
        super().__init__()
        self.make, self.layers = make, torch.nn.ModuleList()

    def grow(self):
        self.layers.append(self.make())
        if isinstance(self.layers[-1], Average):
            self.layers[-1].update(torch.ones(()))


@pytest.mark.parametrize(
    ("make", "what"), [(lambda: torch.nn.BatchNorm1d(1), "layers.0.weight"), (Average, "layers.0")]
)
def test_a_model_that_differs_in_its_modules_is_refused_by_name(alone, make, what):
    model, other = Growing(make), Growing(make)
    state, newcomer = TorchState(model, step=0), TorchState(other, step=0)
    model.grow()
    with pytest.raises(UsageError, match=rf"the model of this worker differs .*{what}"):
        newcomer._set_values(state._values())
    if make is not Average:  # what a commit does not have cannot return to it
        with pytest.raises(UsageError, match=rf"there is no {what}, .*; commit after each change of the layers"):
            state.restore()
        assert model.layers[0].running_mean is not None


def test_a_sparse_buffer_is_refused_by_name():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match="graph of the model is a sparse tensor"):
        TorchState(model)


class Ema:
    """A moving average of a model, without `state_dict`."""

    def __init__(self, model):
        self.about = {"model": model}


def scheduled(model):
    return 0, torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)


@pytest.mark.parametrize("value", [Ema, lambda model: [[model]], lambda model: {"a": Ema(model)}, scheduled])
def test_a_value_with_a_model_or_scheduler_in_it_is_refused(value):
    with pytest.raises(UsageError, match=r"ema of the state is a .* with a \w+, which .* by a copy.* of its own"):
        TorchState(ema=value(torch.nn.Linear(1, 1)))
    TorchState(ema=[1, "x", {"weights": torch.ones(2)}])


def test_metrics_of_torchmetrics_return_to_the_commit():
    torchmetrics = pytest.importorskip("torchmetrics")
    names = {"task": "multiclass", "num_classes": 3}
    both = torchmetrics.MetricCollection([torchmetrics.Accuracy(**names), torchmetrics.Precision(**names)])
    state = TorchState(both=both, mean=torchmetrics.MeanMetric(), rows=torchmetrics.CatMetric())

    def update(value):
        both.update(torch.tensor([0, 1, value]), torch.tensor([0, 1, 2]))
        state.mean.update(value)
        state.rows.update(value)
        return read()

    def read():
        return [value.tolist() for value in (*both.compute().values(), state.mean.compute(), state.rows.compute())]

    update(1)
    before = update(2)
    state.save()
    after = update(0)
    state.restore()
    assert read() == before
    assert update(0) == after != before


def train_on_unequal_rows(dies: int) -> dict[str, Any]:
    """Grow buffers by other numbers of rows on each rank; worker `dies` is killed in a forward pass, if it is not 0."""
    hvd.init()
    torch.manual_seed(0)
    model = Remembering()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    state = TorchState(model, optimizer, step=0)
    entered = []

    @hvd.elastic.run
    def loop(state):
        entered.append((state.step, model.longest, [buffer.tolist() for buffer in model.buffers()]))
        tell("in loop")
        rank, size = hvd.rank(), hvd.size()
        while state.step < STEPS:
            while state.step == JOIN_AT and size == 2 and not dies:
                state.check_host_updates()
                time.sleep(0.001)
            optimizer.zero_grad()
            loss = model(torch.full((1 + 2 * rank, 3), 1.0 + state.step)).square().mean()
            if state.step == LOST_AT and link().worker == dies:
                die()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.check_host_updates()

    loop(state)
    return {"entered": entered[-1], "worlds": len(entered), "model": [param.tolist() for param in model.parameters()]}


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["a loss of rank 0", "a loss of rank 2", "a join"])
def test_buffers_of_unequal_lengths_are_those_of_one_member_after(change):
    dies = {"a loss of rank 0": 1, "a loss of rank 2": 3}.get(change, 0)
    run = partial(together, count=3, left=2) if dies else joined
    results = run(train_on_unequal_rows, dies)
    assert {result["worlds"] for result in results[:2]} == {2}
    assert results[0]["entered"][0] == (LOST_AT if dies else JOIN_AT)
    for result in results[1:]:
        assert (result["entered"], result["model"]) == (results[0]["entered"], results[0]["model"])
