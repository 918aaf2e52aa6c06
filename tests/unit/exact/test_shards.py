"""Loops with virtual workers: the same bits in worlds of any size, through kills, arrivals and a resume."""

from __future__ import annotations

import functools
import io
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spark_elastic.torch as hvd
from spark_elastic.collective.process import Position, process
from spark_elastic.errors import OutsideLoopError, UsageError
from tests.nightly import by_night
from tests.unit.exact.bugs import BUGS, train_with
from tests.unit.exact.loops import train
from tests.unit.ml.in_worlds import kill_and_add
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver, together


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    hvd.shutdown()
    torch.set_num_threads(threads)


@functools.cache
def in_one(*args: Any, **kwargs: Any) -> Any:
    """Train in a world of one: what all others have to come to."""
    try:
        return train(*args, **kwargs)
    finally:
        hvd.shutdown()


def train_slowly(*args: Any, **kwargs: Any) -> Any:
    return train(*args, after_step=lambda step: tell("step", step), **kwargs)


@pytest.mark.nightly
@pytest.mark.parametrize(("virtual", "optimizer"), [(4, "momentum"), (3, "adam"), (1, "momentum")])
def test_the_number_of_workers_changes_no_bit(virtual, optimizer):
    expected = in_one(virtual, optimizer)
    for size in (2, 3):
        assert all(result == expected for result in together(train, virtual, optimizer, count=size)), f"{size} workers"


@pytest.mark.parametrize(
    ("seed", "virtual", "optimizer"), by_night([(0, 5, "momentum"), (1, 4, "adam")], but=[(1, 4, "adam")])
)
def test_kills_and_arrivals_change_no_bit(seed, virtual, optimizer):
    start = (train_slowly, virtual, optimizer)
    with WorldDriver(start_with=3) as driver:
        driver.start(*start, count=3)
        kill_and_add(driver, random.Random(seed), lambda: driver.start(*start))
        assert all(result == in_one(virtual, optimizer) for result in driver.results(1))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_planted_bug_is_noticed(bug):
    expected = in_one(5)
    results = together(train_with, bug, 5, count=3)
    assert any(result != expected for result in results)


def resumed(virtual: int, saved: bytes) -> Any:
    return train(virtual, saved=torch.load(io.BytesIO(saved), weights_only=False))


def test_a_resume_with_another_number_of_workers_changes_no_bit():
    saved = io.BytesIO()  # processes would share the memory of tensors
    torch.save(in_one(4, stop_at=7)[1], saved)
    assert together(resumed, 4, saved.getvalue()) == [in_one(4)] * 2


# --- random numbers outside of shards -----------------------------------------------------------------


def drawn() -> tuple[float, ...]:
    return *torch.rand(3).tolist(), *np.random.random(3), np.random.normal(), random.random(), random.gauss(0, 1)


def test_a_step_that_is_made_again_draws_the_same_numbers_before_its_shards():
    model, workers = small_loop()
    for shard in workers.shards(4, step=0):
        model(torch.ones(len(shard), 2)).sum().backward()
    first = drawn()
    with pytest.raises(UsageError, match="not one of the sums"):
        next(workers.shards(4, step=1)).add("unknown", 1.0)  # the generator is closed
    assert drawn() == first
    for shard in workers.shards(4, step=1):
        model(torch.ones(len(shard), 2)).sum().backward()
    assert drawn() != first


def test_a_worker_that_joins_or_resumes_draws_the_numbers_of_the_others():
    _, workers = small_loop()
    drawn()
    saved = io.BytesIO()
    torch.save(workers.state_dict(), saved)
    expected = drawn(), drawn()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    saved.seek(0)
    workers.load_state_dict(torch.load(saved, weights_only=True))
    assert (drawn(), drawn()) == expected


def small_loop() -> tuple[nn.Module, Any]:
    hvd.init()
    model = nn.Linear(2, 1)
    return model, hvd.elastic.virtual_workers(2, model, torch.optim.SGD(model.parameters(), lr=0.1))


# --- several models -----------------------------------------------------------------------------------


def two_models(norm: bool = False, together: bool = False) -> tuple[Any, ...]:
    hvd.init()
    maker = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3) if norm else nn.Identity())
    judge = nn.Linear(3, 1)
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    both = nn.ModuleList([maker, judge])
    workers = [
        hvd.elastic.virtual_workers(2, both if together else model, optimizer)
        for model, optimizer in zip((maker, judge), steps, strict=True)
    ]
    return maker, judge, steps, workers


def passes(maker: nn.Module, judge: nn.Module, workers: Any, detach: bool) -> None:
    for shard in workers.shards(8, step=0):
        made = maker(torch.ones(len(shard), 2))
        judge(made.detach() if detach else made).sum().backward()


@pytest.mark.parametrize("together", [False, True])
def test_gradients_that_shards_of_another_model_have_changed_are_refused(together):
    maker, judge, (of_maker, of_judge), (makers, judges) = two_models(together=together)
    passes(maker, judge, judges, detach=True)
    of_judge.step()
    passes(maker, judge, makers, detach=False)
    of_maker.step()
    passes(maker, judge, judges, detach=True)
    passes(maker, judge, makers, detach=False)
    of_maker.step()
    with pytest.raises(UsageError, match="step each optimizer before the shards of the next one"):
        of_judge.step()


def test_gradients_that_no_other_shard_has_changed_may_wait():
    maker, judge, (of_maker, of_judge), (makers, judges) = two_models()
    passes(maker, judge, judges, detach=True)
    judge.requires_grad_(False)
    passes(maker, judge, makers, detach=False)
    judge.requires_grad_(True)
    of_judge.step()
    of_maker.step()


def test_buffers_of_another_model_are_refused_unless_both_have_them():
    maker, judge, _, (_, judges) = two_models(norm=True)
    with pytest.raises(UsageError, match=r"the buffer 1.num_batches_tracked, which is not .*ModuleList"):
        passes(maker, judge, judges, detach=True)
    maker, judge, (_, of_judge), (_, judges) = two_models(norm=True, together=True)
    passes(maker, judge, judges, detach=True)
    of_judge.step()
    assert maker[1].num_batches_tracked == 2


# --- batch normalisation ----------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_one_shard_after_another(momentum):
    hvd.init()
    torch.manual_seed(1)
    x = torch.randn(24, 5) * 3 + 1
    norm, expected = (nn.BatchNorm1d(5, momentum=momentum) for _ in range(2))
    workers = hvd.elastic.virtual_workers(4, norm, torch.optim.SGD(norm.parameters(), lr=0.0))
    for step in range(3):
        for shard in workers.shards(24, step):
            norm(x[shard.rows]).square().sum().backward()
        for part in x.split(6):
            expected(part)
    assert norm.num_batches_tracked == expected.num_batches_tracked == 12
    assert torch.allclose(norm.running_mean, expected.running_mean, rtol=1e-5)
    assert torch.allclose(norm.running_var, expected.running_var, rtol=1e-5)


class Remembers(nn.Module):
    """Keeps a value of its last rows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.mean().detach().reshape(1)
        return self.layer(x)


def test_a_buffer_that_no_rule_combines_is_reported_by_its_name():
    hvd.init()
    model = Remembers()
    workers = hvd.elastic.virtual_workers(2, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="buffer seen"):  # noqa: PT012
        for shard in workers.shards(8, 0):
            model(torch.arange(24.0).reshape(8, 3)[shard.rows]).sum().backward()
    assert model.seen.item() == 0.0


# --- what is refused ----------------------------------------------------------------------------------


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_without_the_whole_batch_is_refused():
    hvd.init()
    model, optimizer = linear()
    workers = hvd.elastic.virtual_workers(4, model, optimizer)
    with pytest.raises(UsageError, match="whole batch"):
        optimizer.step()
    for shard in workers.shards(8, 0):
        model(torch.ones(len(shard), 3)).sum().backward()
        break
    with pytest.raises(UsageError, match="whole batch"):
        optimizer.step()
    for shard in workers.shards(8, 0):
        model(torch.ones(len(shard), 3)).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="whole batch"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    hvd.init()
    model = nn.Embedding(5, 2, sparse=True)
    workers = hvd.elastic.virtual_workers(2, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="sparse=False"):  # noqa: PT012
        for shard in workers.shards(4, 0):
            model(torch.arange(len(shard))).sum().backward()


def test_optimizers_and_layers_that_depend_on_the_world_are_refused():
    hvd.init()
    model, optimizer = linear()
    with pytest.raises(UsageError, match="DistributedOptimizer"):
        hvd.elastic.virtual_workers(2, model, hvd.DistributedOptimizer(optimizer))
    with pytest.raises(UsageError, match="LBFGS"):
        hvd.elastic.virtual_workers(2, model, torch.optim.LBFGS(model.parameters()))
    norm = nn.Sequential(hvd.SyncBatchNorm(3))
    with pytest.raises(UsageError, match="0 is a SyncBatchNorm"):
        hvd.elastic.virtual_workers(2, norm, torch.optim.SGD(norm.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="at least 1"):
        hvd.elastic.virtual_workers(0, model, optimizer)
    with pytest.raises(UsageError, match=r"for PyTorch alone.* not Linear and object"):
        hvd.elastic.virtual_workers(2, model, object())


def test_shards_before_the_elastic_loop_of_a_running_job_are_refused():
    hvd.init()
    workers = hvd.elastic.virtual_workers(4, *linear())
    process.position = Position(rank=1, size=3)
    with pytest.raises(OutsideLoopError, match="none of the other 2 workers"), torch.no_grad():
        list(workers.shards(8, 0))


# --- the environment ----------------------------------------------------------------------------------


def test_a_resume_in_another_environment_is_a_warning_that_says_what_differs(caplog):
    hvd.init()
    workers = hvd.elastic.virtual_workers(2, *linear())
    state = workers.state_dict()
    state["environment"] = {**state["environment"], "torch": "1.0", "threads": "7"}
    with caplog.at_level(logging.WARNING):
        workers.load_state_dict(state)
        workers.load_state_dict(state)
    assert len(caplog.records) == 1
    assert f"torch is {torch.__version__}, and was 1.0, threads is 1, and was 7" in caplog.text


@pytest.mark.parametrize(("name", "other"), [("count", 3), ("seed", 5)])
def test_a_resume_with_other_virtual_workers_is_refused(name, other):
    hvd.init()
    workers = hvd.elastic.virtual_workers(2, *linear())
    with pytest.raises(UsageError, match=f"{name}={other}"):
        workers.load_state_dict({**workers.state_dict(), name: other})


def test_the_number_of_threads_is_fixed():
    hvd.init()
    torch.set_num_threads(2)
    workers = hvd.elastic.virtual_workers(2, *linear())
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    with torch.no_grad():
        for _ in workers.shards(4, 0):
            assert torch.get_num_threads() == 1


def test_shards_without_rows_are_left_out():
    hvd.init()
    workers = hvd.elastic.virtual_workers(4, *linear(), sums=["rows"])
    with torch.no_grad():
        for shard in workers.shards(3, 0):
            shard.add("rows", len(shard))
    assert workers.sums == {"rows": 3.0}


def in_other_environments() -> list[str]:
    """What a worker logs in a world in which rank 1 has another version."""
    hvd.init()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("spark_elastic.torch").addHandler(handler)
    workers = hvd.elastic.virtual_workers(2, *linear())
    if hvd.rank() == 1:
        workers.environment_check.environment["torch"] = "1.0"
    with torch.no_grad():
        for step in range(2):
            list(workers.shards(8, step))
    return said


def test_workers_that_differ_are_a_warning_that_says_in_what():
    for said in together(in_other_environments):
        assert len(said) == 1
        assert f"rank 1 differs from rank 0: torch is 1.0, and there it is {torch.__version__}" in said[0]
