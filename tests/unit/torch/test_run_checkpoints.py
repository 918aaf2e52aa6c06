"""The values of a state in a checkpoint, and the checkpoints of a loop, without a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.data.store import Store
from spark_elastic.elastic.frontend import Entry
from spark_elastic.elastic.handlers import TensorSpec
from spark_elastic.elastic.run_checkpoints import RunCheckpoints, folder_of, restored, values_of
from spark_elastic.errors import CheckpointError, RunTakenError, UsageError
from spark_elastic.runs.checkpoints import Checkpoints
from spark_elastic.runs.lease import opened_run
from spark_elastic.runs.tensors import detached, from_bytes, to_bytes
from tests.unit.test_state import FIRST, ScriptedFrontend


def built(**plain: Any) -> tuple[Any, Any, Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    sampler = hvd.elastic.ElasticSampler(range(10), batch_size=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, **plain)
    return state, model, optimizer, schedule


def step(model: Any, optimizer: Any, schedule: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).view(4, 3)).pow(2).sum().backward()
    optimizer.step()
    schedule.step()


def test_a_state_takes_all_values_of_another_from_a_file(alone: Any) -> None:
    state, *parts = built(n=1, seen=[1, (2.0, "two")], best=None)
    for _ in range(3):
        step(*parts)
    rows = np.arange(6, dtype=np.int32).reshape(2, 3)
    state.n, state.seen, state.best, state.sampler.epoch = 3, [1, {"three": b"3"}], [rows], 2
    state.sampler.record_batch(0, 2)
    file = to_bytes(detached(values_of(state), "state"))
    other, *other_parts = built(n=0, seen=[], best=0.5)
    other._set_values(restored(from_bytes(file)))
    for _ in range(2):
        step(*parts)
        step(*other_parts)
    assert (other.n, other.seen) == (3, [1, {"three": b"3"}])
    assert other.best[0].dtype == rows.dtype
    np.testing.assert_array_equal(other.best[0], rows)
    assert other.sampler.state_dict() == {"epoch": 2, "processed_num": 2}
    assert other_parts[2].state_dict() == parts[2].state_dict()
    for one, two in zip(parts[0].state_dict().values(), other_parts[0].state_dict().values(), strict=True):
        assert torch.equal(one, two)
    saved, taken = parts[1].state_dict(), other_parts[1].state_dict()
    assert str(saved) == str(taken)


class OwnState(hvd.elastic.State):
    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self) -> None: ...


class OwnHandler(hvd.elastic.StateHandler):
    def sync(self) -> None: ...


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[Any]:
    with opened_run(Store.create(tmp_path / "run")) as lease:
        yield lease.fence


def frontend_of(fence: Any, resume: Any = None, **settings: Any) -> Any:
    frontend = ScriptedFrontend(FIRST)
    frontend.checkpoints = RunCheckpoints(fence, resume or {}, **settings)
    return frontend


def run(function: Any, state: Any, frontend: Any) -> Any:
    state._frontend = frontend
    return hvd.elastic.run(function)(state)


def within_itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


def never(state: Any) -> None:
    raise AssertionError("the function was called")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (lambda: OwnState(), "OwnState has a save and restore of its own.*ObjectState"),
        (lambda: hvd.elastic.ObjectState(n=0, odd={"a": [object()]}), r"state\.odd\.a\[0\] is of builtins\.object"),
        (lambda: hvd.elastic.TorchState(n=0, odd=slice(1)), r"state\.odd is of builtins\.slice.*state_dict"),
        *(
            (lambda value=value: hvd.elastic.ObjectState(n=0, odd=[value]), rf"state\.odd\[0\] is of .*\.{kind}, which")
            for kind, value in [
                ("TensorSpec", TensorSpec("a", (), torch.float32, True)),
                ("defaultdict", defaultdict(list)),
                ("Fraction", Fraction(1, 3)),
                ("MaskedArray", np.ma.masked_array([1.0], [True])),
                ("ndarray", np.ones(1, ">f4")),
                ("Parameter", torch.nn.Parameter(torch.ones(1))),
            ]
        ),
        (lambda: hvd.elastic.ObjectState(n=0, odd=within_itself()), r"state\.odd contains itself"),
    ],
)
def test_a_state_that_cannot_be_written_is_refused_by_name_before_the_loop(fence: Any, state: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        run(never, state(), frontend_of(fence))


def test_a_value_whose_handler_has_a_sync_of_its_own_is_refused(fence: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("spark_elastic.torch.elastic.state._registry", [(set, OwnHandler)])
    with pytest.raises(UsageError, match=r"odd of the state has a handler \(OwnHandler\) with a sync of its own"):
        run(never, hvd.elastic.TorchState(odd={1}), frontend_of(fence))


def commits_until(limit: int) -> Any:
    def loop(state: Any) -> int:
        first: int = state.n
        while state.n < limit:
            state.n += 1
            state.commit()
        state.n += 100  # as a loop may do after its last commit
        return first

    return loop


def steps_in(fence: Any) -> list[int]:
    return [facts.step for facts in Checkpoints(folder_of(fence.run, 1)).complete()]


def test_the_first_commit_and_the_end_are_written_and_no_commit_within_the_interval(fence: Any) -> None:
    state = hvd.elastic.ObjectState(n=0)
    run(commits_until(9), state, frontend_of(fence))
    assert steps_in(fence) == [1, 9]
    name = Checkpoints(folder_of(fence.run, 1)).complete()[-1].name
    contents = Checkpoints(folder_of(fence.run, 1)).load(name)
    assert from_bytes(contents.files["state.pt"]) == {"light": {"n": 109}}


def test_a_loop_begins_with_the_values_of_its_checkpoint_and_counts_on(fence: Any) -> None:
    run(commits_until(3), hvd.elastic.ObjectState(n=0), frontend_of(fence))
    (_, newest) = Checkpoints(folder_of(fence.run, 1)).complete()
    state = hvd.elastic.ObjectState(n=0)
    order = []
    state.register_reset_callbacks([lambda: order.append(state.n)])
    assert run(commits_until(105), state, frontend_of(fence, {1: newest}, interval_s=0.0)) == 103
    assert order == [103]  # the world may have another size than the one that wrote it
    assert max(steps_in(fence)) == 5


def test_each_loop_of_a_function_has_checkpoints_of_its_own(fence: Any) -> None:
    def function(frontend: Any) -> list[int]:
        frontend.entries[:] = [FIRST, Entry(root=0, version=None, sync=True, moved=False, from_last_loop=True)]
        return [run(commits_until(limit), hvd.elastic.ObjectState(n=0), frontend) for limit in (2, 3)]

    assert function(frontend_of(fence)) == [0, 0]
    newest = {loop: Checkpoints(folder_of(fence.run, loop)).complete()[-1] for loop in (1, 2)}
    assert [facts.step for facts in newest.values()] == [2, 3]
    assert function(frontend_of(fence, newest)) == [102, 103]


def trained_by(kind: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    return hvd.elastic.TorchState(model, kind(model.parameters(), lr=0.1), n=0)


@pytest.mark.parametrize(
    ("wrote", "reads", "why"),
    [
        (lambda: hvd.elastic.ObjectState(n=0), lambda: hvd.elastic.ObjectState(n=0, m=1), "has m"),
        (lambda: hvd.elastic.ObjectState(n=0), lambda: trained_by(torch.optim.SGD), "has model, optimizer"),
        (lambda: trained_by(torch.optim.Adam), lambda: trained_by(torch.optim.SGD), "of type SGD .* of type Adam"),
        (lambda: trained_by(torch.optim.SGD), lambda: trained_by(torch.optim.Adam), "of type Adam .* of type SGD"),
    ],
)
def test_a_checkpoint_of_another_state_is_refused_by_name(fence: Any, alone: Any, wrote: Any, reads: Any, why: str):
    run(commits_until(1), wrote(), frontend_of(fence))
    (*_, newest) = Checkpoints(folder_of(fence.run, 1)).complete()
    frontend = frontend_of(fence, {1: newest})
    with pytest.raises(CheckpointError, match=f"{newest.name} in .* is of another state: .*{why}.*another run_id"):
        run(never, reads(), frontend)


def test_a_value_that_becomes_unwritable_is_said_and_the_loop_goes_on(fence: Any, caplog: Any) -> None:
    def loop(state: Any) -> None:
        state.n = object()
        state.commit()

    run(loop, hvd.elastic.ObjectState(n=0), frontend_of(fence))
    assert "a checkpoint could not be written (CheckpointError: state.n is of builtins.object" in caplog.text
    assert steps_in(fence) == []


def test_a_commit_ends_the_loop_of_a_driver_whose_run_was_taken(fence: Any) -> None:
    frontend = frontend_of(fence)

    def loop(state: Any) -> None:
        frontend.checkpoints._writer.fenced = RunTakenError("taken")
        state.commit()

    with pytest.raises(RunTakenError, match="taken"):
        run(loop, hvd.elastic.ObjectState(n=0), frontend)
