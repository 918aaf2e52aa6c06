"""Worlds that break and grow under a training loop: real processes, real kills."""

from __future__ import annotations

import threading

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from tests.nightly import by_night
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver, joined, together

STEPS = 12


def build():
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def fingerprint(model) -> list[float]:
    return [round(p.double().sum().item(), 9) for p in model.parameters()]


def train(commit_every: int, dies: dict[int, tuple[int, str]]):
    """Each worker in `dies` kills itself at (step, where)."""
    hvd.init()
    model, optimizer = build()
    applied: list[int] = []
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    me = link().worker

    def maybe_die(step: int, where: str) -> None:
        if dies.get(me) == (step, where):
            die()

    @hvd.elastic.run
    def loop(state):
        while state.step < STEPS:
            maybe_die(state.step, "before backward")
            generator = torch.Generator().manual_seed(state.step)
            x = torch.randn(4, 6, generator=generator)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            maybe_die(state.step, "after backward")
            optimizer.step()
            maybe_die(state.step, "after step")
            applied.append(state.step)
            state.step += 1
            if state.step % commit_every == 0:
                state.commit()
            else:
                state.check_host_updates()
            maybe_die(state.step, "after commit")
        return state.progress

    progress = loop(state)
    return {"applied": applied, "progress": progress, "model": fingerprint(model), "size": hvd.size()}


@pytest.mark.parametrize(
    ("commit_every", "where"),
    by_night([(5, "before backward"), (1, "after backward"), (5, "after step")], but=[(5, "before backward")]),
)
def test_a_killed_worker_costs_the_survivors_no_step_and_no_step_is_applied_twice(commit_every, where):
    results = together(train, commit_every, {2: (7, where)}, count=3, left=2)
    for result in results:
        assert result["size"] == 2
        assert result["progress"] == STEPS
        assert result["applied"] == sorted(set(result["applied"])), "a step was applied twice"
    # a survivor whose last reduction broke off takes that step over from one whose did not
    assert list(range(STEPS)) in [result["applied"] for result in results]
    assert results[0]["model"] == results[1]["model"]


def test_the_root_may_die_and_twice_in_a_row():
    (result,) = together(train, 5, {1: (3, "after backward"), 2: (8, "before backward")}, count=3, left=1)
    assert result["applied"] == list(range(STEPS))
    assert result["size"] == 1


def train_until_joined(want: int):
    hvd.init()
    first = hvd.size()
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.99)
    sizes: list[int] = []
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0, history=[])
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

    @hvd.elastic.run
    def loop(state):
        tell("in loop", hvd.size())
        left = 3
        while left:
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            state.step += 1
            state.history.append(state.step)
            if hvd.size() >= want:
                left -= 1
            state.commit()
        return state.step

    step = loop(state)
    return {
        "step": step,
        "progress": state.progress,
        "history": state.history == list(range(1, step + 1)),
        "lr": optimizer.param_groups[0]["lr"],
        "model": fingerprint(model),
        "momentum": sorted(float(s["momentum_buffer"].sum()) for s in optimizer.state.values()),
        "first": first,
        "sizes": sizes,
    }


def test_a_newcomer_takes_over_everything_at_a_step_all_agree_on():
    with WorldDriver(start_with=2) as driver:
        driver.start(train_until_joined, 3, count=2)
        driver.wait(lambda: len(driver.told("in loop")) == 2)
        driver.start(train_until_joined, 3)
        results = driver.results(3)
        assert len(driver.worlds) == 2
    for key in ("step", "progress", "history", "lr", "model", "momentum"):
        assert results[0][key] == results[1][key] == results[2][key], key
    assert results[0]["progress"] == results[0]["step"]
    assert [result["sizes"] for result in results] == [[3], [3], []]
    assert results[2]["first"] == 3  # its provisional size was right, so nothing changed for it


def train_in_reset_callbacks():
    hvd.init()
    model, optimizer = build()
    sizes: list[tuple[int, float]] = []
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def step(rows):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    def on_reset():
        sizes.append((hvd.size(), hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()))
        progress = state.progress
        step(torch.full((2, 6), float(1 + hvd.rank())))
        state.commit()
        assert state.progress == progress

    state.register_reset_callbacks([on_reset])

    @hvd.elastic.run
    def loop(state):
        tell("in loop", hvd.size())
        left = 3
        while left:
            step(torch.ones(2, 6))
            state.step += 1
            left -= hvd.size() == 3
            state.commit()
        return hvd.allgather_object((state.step, state.progress, fingerprint(model)))

    return sizes, loop(state)


@pytest.mark.nightly
def test_steps_and_collectives_of_reset_callbacks_are_local_and_not_counted():
    results = joined(train_in_reset_callbacks)
    assert [sizes for sizes, _ in results] == [[(3, 1.0)], [(3, 1.0)], []]
    for _, gathered in results:
        assert gathered == [gathered[0]] * 3
        assert gathered[0][0] == gathered[0][1]


def steps_before_the_loop():
    """As in Horovod's Keras example: one step before the loop, so that the optimizer has its slots."""
    hvd.init()
    model, optimizer = build()
    newcomer = hvd.size() > 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    model(torch.full((1, 6), float(1 + newcomer))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    own = torch.full((2,), 3.0)
    alone = {
        "object": hvd.broadcast_object("mine"),
        "mean": hvd.allreduce(own).tolist(),
        "sum": hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0).tolist(),
        "grouped": [t.tolist() for t in hvd.grouped_allreduce([own, own])],
        "gathered": hvd.allgather(own).tolist(),
        "objects": hvd.allgather_object("mine"),
        "scattered": hvd.reducescatter(own).tolist(),
        "exchanged": hvd.alltoall(own).tolist(),
        "position": (hvd.rank(), hvd.size()),
    }
    hvd.barrier()
    if newcomer:
        with pytest.raises(hvd.OutsideLoopError, match="rows for 2 ranks before the elastic loop"):
            hvd.alltoall(own, splits=[1, 1])
    state = hvd.elastic.TorchState(model, optimizer, n=0)

    @hvd.elastic.run
    def loop(state):
        tell("in loop")
        while hvd.size() < 2:
            state.commit()
        for _ in range(3):
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return hvd.allreduce(torch.tensor([float(hvd.rank())])).item()

    return loop(state), alone, {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_newcomer_steps_alone_before_the_loop_and_takes_the_state_there():
    (first, _, weights), (second, alone, same) = joined(steps_before_the_loop, count=1)
    assert (first, second) == (0.5, 0.5)
    assert same == weights
    assert alone == {
        "object": "mine",
        "mean": [3.0, 3.0],
        "sum": [6.0, 6.0],
        "grouped": [[3.0, 3.0], [3.0, 3.0]],
        "gathered": [3.0, 3.0],
        "objects": ["mine"],
        "scattered": [3.0, 3.0],
        "exchanged": [3.0, 3.0],
        "position": (1, 2),
    }


def train_while_a_peer_dies_in_the_optimizers_step():
    """Rank 1 dies in its optimizer's step, and rank 0 learns of it within its own, as it waits for joined ranks."""
    hvd.init()
    applied = []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            if hvd.size() == 2 and state.step == 4:
                if hvd.rank() == 1:
                    die()
                process.group().report_stall(True)
                (waiting,) = [each for each in threading.enumerate() if each.name == "spark_elastic-join"]
                waiting.join()
            return super().step(closure)

    model = torch.nn.Linear(3, 1)
    state = hvd.elastic.TorchState(model, hvd.DistributedOptimizer(Slow(model.parameters(), lr=0.1)), step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < 8:
            state.optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            state.optimizer.step()
            applied.append(state.step)
            state.step += 1
            state.check_host_updates()

    loop(state)
    return applied


def test_a_step_that_was_reduced_before_the_loss_is_marked_after_it():
    assert together(train_while_a_peer_dies_in_the_optimizers_step, left=1) == [list(range(8))]


class OptionsState(hvd.elastic.State):
    """A custom state as Horovod documents it: its own values, copied by `save`, and a broadcast in `sync`."""

    def __init__(self, **options):
        self.options = options
        self.saved = dict(options)
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)

    def save(self):
        self.saved = dict(self.options)

    def restore(self):
        self.options = dict(self.saved)

    def sync(self):
        self.saved = self._bcast_object(self.saved)
        self.options = dict(self.saved)

    def on_reset(self):
        self.options["resets"] = self.options.get("resets", 0) + 1
        super().on_reset()


class ScaledState(hvd.elastic.ObjectState):
    """A subclass that extends the methods of the package's own state."""

    def __init__(self, **kwargs):
        self.synced = 0
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def sync(self):
        super().sync()
        self.synced += 1


def train_with_a_custom_state(kind):
    hvd.init()
    sizes = []
    state = OptionsState(n=0) if kind == "state" else ScaledState(options={"n": 0})
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
    state.on_hosts_updated(0, 0)

    @hvd.elastic.run
    def loop(state):
        while state.options["n"] < 8:
            if link().worker == 3 and state.options["n"] == 5:
                die()
            state.options["n"] += int(hvd.allreduce(torch.ones(1), op=hvd.Average))
            if state.options["n"] % 2 == 0:
                state.commit()
            else:
                state.check_host_updates()
        return state.options["n"], state.progress

    return loop(state), sizes, state._rank() == hvd.rank()


@pytest.mark.parametrize("kind", by_night(["state", "object state"], but=["state"]))
def test_a_custom_state_of_horovod_outlives_a_lost_worker(kind):
    assert together(train_with_a_custom_state, kind, count=3, left=2) == [((8, 8), [2], True)] * 2


def dies_in_sync():
    hvd.init()
    model = torch.nn.Linear(1000, 1000)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    if link().worker == 1:
        original = hvd.elastic.TorchState.sync

        def sync(self):
            if hvd.size() == 3:
                die()
            original(self)

        hvd.elastic.TorchState.sync = sync

    @hvd.elastic.run
    def loop(state):
        tell("in loop", hvd.size())
        left = 5
        while left:
            left -= process.assignment.world.round == 3
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
        return state.step, fingerprint(model), hvd.size()

    return loop(state)


def test_a_root_that_dies_during_the_sync_leaves_the_others_with_a_whole_state():
    with WorldDriver(start_with=2) as driver:
        driver.start(dies_in_sync, count=2)
        driver.wait(lambda: len(driver.told("in loop")) == 2)
        driver.start(dies_in_sync)
        driver.wait(lambda: len(driver.worlds) >= 3)
        assert driver.worlds[-1].size == 2
        results = driver.results(2)
    assert results[0] == results[1]
