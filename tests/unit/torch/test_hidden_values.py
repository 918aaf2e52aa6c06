"""What optimizers, modules and metrics keep outside of their parameters outlives a loss, and reaches newcomers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.torch.elastic import TorchState
from tests.simulation.hidden_values import Average, Lookahead, Remembering, Signs
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver

STEPS = 9
LOST_AT = 5
JOIN_AT = 4


def skip(state):
    pass


def train(kind: str, step_begins: Any = skip, loss_computed: Any = skip, step_made: Any = skip) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Remembering(3) if kind == "buffers" else torch.nn.Linear(3, 1)
    temperature = torch.nn.Parameter(torch.ones(()))
    params = [*model.parameters(), *([temperature] if kind == "temperature" else [])]
    optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if kind == "optimizer within":
        optimizer = Lookahead(torch.optim.Adam(params, lr=0.1))
    if kind == "optimizer":
        optimizer = Signs(params)
    optimizer = hvd.DistributedOptimizer(optimizer)
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
            loss_computed(state)
            optimizer.step()
            step_made(state)
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


KINDS = ["optimizer within", "optimizer", "metric", "buffers", "temperature", "attribute"]


@pytest.mark.parametrize("when", ["step_begins", "loss_computed", "step_made"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_return_with_the_step_that_is_done_again(alone, kind, when):
    def fail(state):
        if state.step == LOST_AT and not failed:
            failed.append(state.step)
            raise HorovodInternalError("a peer is gone")

    failed: list[int] = []
    assert train(kind, **{when: fail}) == train(kind)
    assert failed


def train_with_a_newcomer(kind: str) -> dict[str, Any]:
    def wait_for_newcomer(state):
        tell("in loop")
        while state.step == JOIN_AT and hvd.size() == 2:
            state.check_host_updates()
            time.sleep(0.001)

    hvd.init()
    return train(kind, wait_for_newcomer)


@pytest.mark.parametrize("kind", KINDS)
def test_newcomer_ends_with_the_values_of_one_process(alone, kind):
    expected = train(kind)
    with WorldDriver(start_with=2) as driver:
        driver.start(train_with_a_newcomer, kind, count=2)
        driver.wait(lambda: len(driver.told("in loop")) >= 2)
        driver.start(train_with_a_newcomer, kind)
        results = driver.results(3)
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
    model = Remembering(3)
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


@pytest.mark.parametrize("change", ["a loss of rank 0", "a loss of rank 2", "a join"])
def test_buffers_of_unequal_lengths_are_those_of_one_member_after(change):
    dies = {"a loss of rank 0": 1, "a loss of rank 2": 3}.get(change, 0)
    with WorldDriver(start_with=3 if dies else 2) as driver:
        driver.start(train_on_unequal_rows, dies, count=3 if dies else 2)
        driver.wait(lambda: len(driver.told("in loop")) >= 2)
        if not dies:
            driver.start(train_on_unequal_rows, dies)
        results = driver.results(2 if dies else 3)
    assert {result["worlds"] for result in results[:2]} == {2}
    assert results[0]["entered"][0] == (LOST_AT if dies else JOIN_AT)
    for result in results[1:]:
        assert (result["entered"], result["model"]) == (results[0]["entered"], results[0]["model"])
