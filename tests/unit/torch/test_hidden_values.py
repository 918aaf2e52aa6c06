"""What optimizers, modules and metrics keep outside of their parameters outlives a loss, and reaches newcomers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import UsageError
from spark_elastic.torch.elastic import TorchState
from tests.simulation.hidden_values import Average


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


def test_an_optimizer_of_the_states_parameters_that_is_not_in_it_is_refused(alone):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @hvd.elastic.run
    def loop(state):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        state.commit()

    with pytest.raises(UsageError, match=r"an optimizer of the state's parameters \(SGD\) .* not in its state"):
        loop(TorchState(model, steps=0))
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


@pytest.mark.parametrize("value", [Ema, lambda model: [[model]], lambda model: {"a": Ema(model)}])
def test_a_value_with_a_model_in_it_is_refused(value):
    with pytest.raises(UsageError, match=r"ema of the state is a .* with a Linear, which would be replaced by a copy"):
        TorchState(ema=value(torch.nn.Linear(1, 1)))


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
