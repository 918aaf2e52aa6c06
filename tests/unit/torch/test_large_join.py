"""A newcomer reads the state from a survivor's memory; survivors keep theirs, if it is equal."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective import peer_memory
from spark_elastic.collective.peer_memory import offered, read
from spark_elastic.elastic import handlers as elastic_handlers
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux copies between processes")
pytestmark = needs_linux


def tensors_of_many_kinds() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(3 << 20, generator=generator)  # 12 MB: in two parts
    image = torch.randn(2, 3, 5, 5, generator=generator)
    many = [torch.tensor(float(number)) for number in range(1100)]  # more than one system call takes
    return [
        big,
        torch.zeros(0),
        torch.arange(7),
        torch.tensor(True),
        image.to(memory_format=torch.channels_last),
        torch.randn(4, 6, generator=generator).t(),
        torch.randn(3, generator=generator).to(torch.bfloat16),
        torch.randn(3, 2, dtype=torch.complex64, generator=generator),
        torch.nn.Parameter(torch.randn(9, generator=generator)),
        torch.randn(1, 8, generator=generator)[:, 0],  # one element, of stride 8
        *many,
    ]


def unlike(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(tensor, memory_format=torch.preserve_format).detach()
    return out.fill_(False if tensor.dtype is torch.bool else 77)


def test_tensors_of_every_kind_are_read_bit_for_bit():
    sources = tensors_of_many_kinds()
    targets = [unlike(source) for source in sources]
    with offered(sources) as offer:
        assert offer is not None
        assert all(read(offer, targets, lambda: None))
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_what_has_gaps_or_another_layout_is_left_out_and_the_others_are_read():
    plain, gaps = torch.ones(5), torch.ones(4, 4)[:, ::2]
    rows, columns = torch.ones(3, 4), torch.zeros(4, 3).t()
    sources = [gaps, plain, rows, torch.ones(2), torch.ones(2, dtype=torch.float64)]
    targets = [torch.zeros(4, 2), torch.zeros(5), columns, torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
    with offered(sources) as offer:
        assert offer is not None
        assert read(offer, targets, lambda: None) == [False, True, False, False, True]
    assert [target.sum().item() for target in targets] == [0.0, 5.0, 0.0, 0.0, 2.0]


def test_a_process_without_the_nonce_is_not_read():
    source, target = torch.ones(5), torch.zeros(5)
    with offered([source]) as offer:
        assert offer is not None
        other = offer._replace(nonce=bytes(len(offer.nonce)))
        assert read(other, [target], lambda: None) == [False]
        nowhere = offer._replace(nonce_at=8)
        assert read(nowhere, [target], lambda: None) == [False]
    assert target.sum() == 0


def test_a_process_that_is_gone_is_not_read():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    target = torch.zeros(5)
    with offered([torch.ones(5)]) as offer:
        assert offer is not None
        assert read(offer._replace(pid=gone.pid), [target], lambda: None) == [False]


def test_reading_ends_when_it_is_not_needed_any_more():
    source = torch.ones(5 << 20)  # 20 MB
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("the round is over")

    target = torch.zeros(5 << 20)
    with offered([source]) as offer:
        assert offer is not None
        with pytest.raises(RuntimeError, match="the round is over"):
            read(offer, [target], check)
    assert 0 < target.sum() < source.sum()


# --- worlds -------------------------------------------------------------------------------------------

WIDTH = 32
JOIN_AT = 4
STEPS = 8


def train_across_a_join(faults: dict[int, str], changed: int = 0):
    """Train, and wait at one step until a newcomer has come.

    Args:
        faults: what happens in a worker, by its id.
        changed: the worker that changes a parameter of its own before the join, unseen by torch.
    """
    me = link().worker
    received: list[int] = []
    broadcast = elastic_handlers.broadcast_tensors

    def counted(tensors, *rest):
        received.append(len(tensors))
        broadcast(tensors, *rest)

    elastic_handlers.broadcast_tensors = counted
    plant(faults.get(me, ""))
    hvd.init()
    torch.manual_seed(me)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0, seen=[])
    applied: list[int] = []

    @hvd.elastic.run
    def loop(state):
        joined = hvd.size() == 3
        tell("in loop", (me, hvd.size()))
        while state.step < STEPS:
            if state.step == JOIN_AT and not joined:
                if me == changed:
                    model[0].weight.data.add_(1.0)
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
    return {"applied": applied, "received": received, "end": end, "commit": commit}


def plant(fault: str) -> None:
    """Make reading another process's memory fail in this worker, or plant a bug."""
    copy, reads = peer_memory._copy, []
    peer_memory._MOST_BYTES_AT_ONCE = 4096  # several parts, also of a small model

    def copy_with_fault(pid, pieces):
        reads.append(pid)
        if fault == "refused" or (fault == "refused later" and len(reads) == 3):
            raise OSError(errno.EPERM, "not permitted")
        if fault == "dies" and len(reads) == 3:
            die()
        if fault == "outlives the root" and len(reads) == 3:
            tell("reading")
            until = time.monotonic() + 30.0
            while time.monotonic() < until:
                copy(pid, pieces)  # ends with an error when the root is gone
                time.sleep(0.002)
        copy(pid, pieces)

    peer_memory._copy = copy_with_fault
    if fault == "bug: parts that were not read count":
        read_all = peer_memory.read
        peer_memory._copy = lambda pid, pieces: copy(pid, pieces) if pieces[0][2] == 32 else None  # the nonce
        peer_memory.read = lambda offer, targets, check: [True] * len(read_all(offer, targets, check))
    if fault == "bug: survivors are not compared":
        differing = elastic_handlers._differing
        elastic_handlers._differing = lambda *given: torch.zeros_like(differing(*given))


def join(faults: dict[int, str], changed: int = 0):
    with WorldDriver(start_with=2) as driver:
        driver.start(train_across_a_join, faults, changed, count=2)
        driver.wait(lambda: len(driver.told("in loop")) == 2)
        driver.start(train_across_a_join, faults, changed)
        return driver.results(3)


@pytest.fixture(scope="module")
def undisturbed():
    return join({})


def test_a_newcomer_reads_everything_and_the_survivors_receive_only_what_differs(undisturbed):
    assert len({result["end"] for result in undisturbed}) == 1
    assert len({result["commit"] for result in undisturbed}) == 1
    assert undisturbed[0]["commit"][1] == JOIN_AT
    assert undisturbed[0]["end"][1]
    # all tensors when the job began, the other survivor's included; then the two running statistics of each rank
    assert [result["received"][-1] for result in undisturbed] == [2, 2, 2]


@pytest.mark.parametrize("fault", ["refused", "refused later"])
def test_where_memory_cannot_be_read_the_rest_is_sent(undisturbed, fault):
    results = join({3: fault})
    compare(results, undisturbed)
    assert [result["commit"] for result in results] == [result["commit"] for result in undisturbed]
    assert results[0]["received"][-1] > 2


def test_a_survivor_that_has_changed_a_tensor_alone_receives_it(undisturbed):
    results = join({}, changed=2)
    compare(results, undisturbed)
    assert results[0]["received"][-1] == 3


@pytest.mark.parametrize(
    ("bug", "changed"),
    [("bug: parts that were not read count", 0), ("bug: survivors are not compared", 2)],
)
def test_planted_bugs_are_detected(undisturbed, bug, changed):
    # unread memory may hold a number of steps that Adam refuses
    with pytest.raises(AssertionError, match=r"states differ|a worker raised"):
        compare(join({1: bug, 2: bug, 3: bug}, changed), undisturbed)


def compare(results, undisturbed):
    assert [result["end"] for result in results] == [result["end"] for result in undisturbed], "states differ"


def steps_across_a_join(first_used_in: int):
    """Train an embedding of sparse gradients and two layers across a join; return what was sent before `step`.

    Args:
        first_used_in: the step from which on, on rank 0, the second layer is used.
    """
    me = link().worker
    hvd.init()
    torch.manual_seed(0)
    table = torch.nn.Embedding(8, WIDTH, sparse=True)
    layer, late = torch.nn.Linear(WIDTH, 2), torch.nn.Linear(WIDTH, 2)
    model = torch.nn.ModuleList([table, layer, late])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    sent: list[tuple[int, int, bool]] = []

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
            sent.append((hvd.size(), state.step, optimizer._reducer.launched > 0))
            optimizer.step()
            sent[-1] += (table.weight.grad.is_sparse,)
            state.step += 1
            state.check_host_updates()

    loop(state)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return {"sent": sent, "rank": hvd.rank(), "weights": hashlib.sha256(weights).hexdigest(), "me": me}


@pytest.mark.parametrize("first_used_in", [0, JOIN_AT + 2])
def test_the_first_step_with_a_newcomer_sends_gradients_while_backward_runs(first_used_in):
    with WorldDriver(start_with=2) as driver:
        driver.start(steps_across_a_join, first_used_in, count=2)
        driver.wait(lambda: len(driver.told("in loop")) == 2)
        driver.start(steps_across_a_join, first_used_in)
        results = driver.results(3)
    assert len({result["weights"] for result in results}) == 1
    for result in results:
        assert all(sparse for *_, sparse in result["sent"])
        sent = {step: before for _, step, before, _ in result["sent"]}
        assert [step for size, step, *_ in result["sent"] if size == 3] == list(range(JOIN_AT, STEPS))
        if result["rank"] == 0:  # the others lack gradients of the only bucket
            # before all gradients were seen once, sparse ones can only be known after backward
            assert sent[JOIN_AT] == (first_used_in == 0)
            assert sent[STEPS - 1]
            assert 0 not in sent or not sent[0]


def test_a_root_that_dies_while_it_is_read_leaves_the_others_with_a_whole_state():
    with WorldDriver(start_with=2) as driver:
        driver.start(train_past_a_loss, {3: "outlives the root"}, count=2)
        driver.wait(lambda: len(driver.told("in loop")) == 2)
        driver.start(train_past_a_loss, {3: "outlives the root"})
        driver.wait(lambda: driver.told("reading"))
        driver.kill(1)
        survivor, newcomer = driver.results(2)
    assert survivor["applied"] == list(range(STEPS))
    assert survivor["end"] == newcomer["end"]
    assert newcomer["applied"] == list(range(JOIN_AT, STEPS))


def test_a_newcomer_that_dies_while_it_reads_costs_the_survivors_nothing():
    with WorldDriver(start_with=2) as driver:
        driver.start(train_past_a_loss, {3: "dies"}, count=2)
        driver.wait(lambda: len(driver.told("in loop")) == 2)
        driver.start(train_past_a_loss, {3: "dies"})
        results = driver.results(2)
    assert [result["applied"] for result in results] == [list(range(STEPS))] * 2
    assert results[0]["end"] == results[1]["end"]


def train_past_a_loss(faults: dict[int, str]):
    """As `train_across_a_join`, in worlds of any size: the loop waits for the newcomer at its first time only."""
    me = link().worker
    plant(faults.get(me, ""))
    hvd.init()
    torch.manual_seed(me)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    applied: list[int] = []
    worlds: list[int] = []

    @hvd.elastic.run
    def loop(state):
        worlds.append(hvd.size())
        tell("in loop", os.getpid())
        while state.step < STEPS:
            while state.step == JOIN_AT and me < 3 and len(worlds) == 1:
                state.check_host_updates()
                time.sleep(0.001)
            generator = torch.Generator().manual_seed(state.step)
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            applied.append(state.step)
            state.step += 1
            state.check_host_updates()

    loop(state)
    sums = hashlib.sha256()
    for tensor in [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]:
        sums.update(tensor.detach().numpy().tobytes())
    return {"applied": applied, "end": sums.hexdigest()}


@pytest.mark.parametrize(
    ("kind", "options", "tensors"),
    [
        (torch.optim.Adam, {}, 2),
        (torch.optim.Adam, {"amsgrad": True}, 3),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (torch.optim.LBFGS, {}, 0),
        (torch.optim.SparseAdam, {}, 0),  # refuses the dense gradients that it is tried with
    ],
)
def test_the_memory_that_is_prepared_fits_and_the_optimizer_stays_as_it_was(alone, kind, options, tensors):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), **options))
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(None))
    state = hvd.elastic.TorchState(model, optimizer)
    state._before_joining()
    room = [tensor for kept in state._handlers.by_name["optimizer"]._room.values() for tensor in kept]
    assert len(room) == 2 * 4 * tensors  # for the state itself and for its copy
    assert not optimizer.state
    assert not stepped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(param.grad is None for param in model.parameters())


def test_a_state_is_taken_over_into_the_memory_that_was_prepared(alone):
    model, other = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    trained = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    trained.step()
    state = hvd.elastic.TorchState(other, torch.optim.Adam(other.parameters()))
    state._before_joining()
    handler = state._handlers.by_name["optimizer"]
    room = {tensor.data_ptr() for kept in handler._room.values() for tensor in kept}
    layout = hvd.elastic.TorchState(model, trained)._handlers.by_name["optimizer"].layout()
    own = [tensor for tensor in handler.tensors(layout) if tensor.dim()]
    handler.save()
    copies = [tensor for tensor in handler._copies if tensor.dim()]
    assert {tensor.data_ptr() for tensor in [*own, *copies]} == room
    assert not any(handler._room.values())
