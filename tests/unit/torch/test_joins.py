"""All members hold the same state once a newcomer has joined, whatever happens while it is sent."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.elastic import handlers as elastic_handlers
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import joined

WIDTH = 32
JOIN_AT = 4
STEPS = 8


def train_across_a_join(changed: int = 0, fault: str = ""):
    """Train across a join, before which the worker `changed` changes a parameter, unseen by torch."""
    me = link().worker
    plant(fault)
    hvd.init()
    torch.manual_seed(me)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
    layers[2].weight.data = layers[2].weight.data.t().contiguous().t()  # of another order in memory
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0, seen=[])
    applied: list[int] = []

    @hvd.elastic.run
    def loop(state):
        joined = hvd.size() == 3
        while state.step < STEPS:
            if state.step == JOIN_AT and not joined:
                if me == changed:
                    model[0].weight.data.add_(1.0)
                tell("waits", me)
                while True:
                    state.check_host_updates()
                    time.sleep(0.001)
            generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            applied.append(state.step)
            state.seen.append(state.step)
            state.step += 1
            state.check_host_updates()
        end = sums(model.parameters()), state.seen == list(range(STEPS)), optimizer.param_groups[0]["lr"]
        version = str(state.version)
        state.restore()  # to the commit that was made when the newcomer joined
        return (*end, version), (sums(model.state_dict().values()), state.step)

    def sums(tensors):
        out = hashlib.sha256()
        for tensor in [*tensors, *(value for kept in optimizer.state.values() for value in kept.values())]:
            out.update(tensor.detach().numpy().tobytes())
        return out.hexdigest()

    end, commit = loop(state)
    return {"applied": applied, "end": end, "commit": commit}


def plant(fault: str) -> None:
    """Let this worker die while it receives a state, or plant a bug."""
    if fault == "dies":
        elastic_handlers.broadcast_tensors = lambda *given: die()
    if fault == "tensors are not compared":
        differing = elastic_handlers._differing
        elastic_handlers._differing = lambda *given: [False] * len(differing(*given))


def join(changed: int = 0, fault: str = ""):
    # the newcomer joins at that step, and at no earlier one
    return joined(train_across_a_join, changed, fault, told="waits")


@pytest.fixture(scope="module")
def undisturbed():
    return join()


def test_newcomer_and_survivors_hold_and_commit_the_same_state(undisturbed):
    assert len({result["end"] for result in undisturbed}) == 1
    assert len({result["commit"] for result in undisturbed}) == 1
    assert undisturbed[0]["commit"][1] == JOIN_AT
    assert undisturbed[0]["end"][1]


def test_survivor_that_has_changed_a_tensor_alone_receives_it(undisturbed):
    compare(join(changed=2), undisturbed)


def test_planted_bug_is_detected(undisturbed):
    # memory that nothing was written to may hold a number of steps that Adam refuses
    with pytest.raises(AssertionError, match=r"states differ|a worker raised"):
        compare(join(fault="tensors are not compared"), undisturbed)


def compare(results, undisturbed):
    assert [result["end"] for result in results] == [result["end"] for result in undisturbed], "states differ"


def steps_across_a_join(first_used_in: int):
    """Train sparse gradients across a join; rank 0 uses a second layer from step `first_used_in` on."""
    hvd.init()
    torch.manual_seed(0)
    table = torch.nn.Embedding(8, WIDTH, sparse=True)
    layer, late = torch.nn.Linear(WIDTH, 2), torch.nn.Linear(WIDTH, 2)
    model = torch.nn.ModuleList([table, layer, late])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    sparse: list[bool] = []

    @hvd.elastic.run
    def loop(state):
        tell("in loop")
        while state.step < STEPS:
            while state.step == JOIN_AT and hvd.size() == 2:
                state.check_host_updates()
                time.sleep(0.001)
            optimizer.zero_grad()
            rows = table(torch.tensor([hvd.rank(), state.step]))
            loss = layer(rows).square().sum()
            if hvd.rank() == 0 and state.step >= first_used_in:
                loss = loss + late(rows).sum()
            loss.backward()
            sparse.append(table.weight.grad.is_sparse)
            optimizer.step()
            state.step += 1
            state.check_host_updates()

    loop(state)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return {"sparse": sparse, "weights": hashlib.sha256(weights).hexdigest()}


@pytest.mark.nightly
@pytest.mark.parametrize("first_used_in", [0, JOIN_AT + 2])
def test_sparse_gradients_stay_sparse_with_a_newcomer(first_used_in):
    results = joined(steps_across_a_join, first_used_in)
    assert len({result["weights"] for result in results}) == 1
    assert all(all(result["sparse"]) for result in results)
    of_newcomer, *of_others = sorted(len(result["sparse"]) for result in results)
    assert of_others == [STEPS, STEPS]
    assert STEPS - JOIN_AT <= of_newcomer < STEPS  # on a busy machine it comes before the others wait for it
