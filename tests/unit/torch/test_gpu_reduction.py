"""Reductions of tensors on GPUs, without a GPU: tensors of float64 play those on a GPU, and a Gloo group plays NCCL.

What is real: the processes, their kills, the agreement, the waiting, the cut, and how the next world begins.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

import spark_elastic.torch as hvd
from spark_elastic.collective import group, reduce
from spark_elastic.collective.gpu import devices, nccl
from spark_elastic.collective.gpu.devices import DeviceInfo, MemberDevice
from spark_elastic.collective.objects import _broadcast_on, broadcast_tensors
from spark_elastic.collective.process import process
from spark_elastic.errors import HorovodInternalError
from spark_elastic.torch import operations
from tests.unit.torch.test_nccl_communicator import Event
from tests.unit.world_link import die, link
from tests.unit.worlds import WorldDriver, together

STEPS = 10
with_nccl = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < devices.OLDEST_TORCH_FOR_NCCL,
    reason="no NCCL, nor its stand-in",
)


class Work:
    """As NCCL's, whose `wait` makes the stream wait: here this thread is the stream, and an abort lets it go on.

    With an exception it is completed, too.
    """

    def __init__(self, work, pg):
        self._work, self._pg = work, pg

    def wait(self):
        Runtime.waited_for = self
        while not (self._work.is_completed() or self._pg in Pg.aborted):
            time.sleep(1e-4)
        return True

    def is_completed(self):
        return self._work.is_completed()

    def exception(self):
        return self._work.exception()


class Pg:
    aborted: ClassVar[list[Any]] = []
    """Kept: unlike NCCL's, a Gloo group's destructor waits for what is in flight, with Python's lock in its hands."""
    broadcasts = 0
    dies_at: ClassVar[int | None] = None

    def __init__(self, pg):
        self._pg = pg

    def allreduce(self, tensors, options):
        return Work(self._pg.allreduce(tensors, options), self)

    def broadcast(self, tensors, options):
        Pg.broadcasts += 1
        if Pg.dies_at == Pg.broadcasts:
            die()
        return Work(self._pg.broadcast(tensors, options), self)

    def abort(self):
        Pg.aborted.append(self)


class Runtime:
    connected = 0
    waited_for = None

    def connect(self, store, rank, size, device):
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        Runtime.connected += 1
        return Pg(ProcessGroupGloo(store, rank, size, options))

    def reduce_once(self, pg, device):
        pg.allreduce([torch.zeros(1)], dist.AllreduceOptions())._work.wait()

    def mark(self, device):
        return Event(Runtime.waited_for)


def pretend(uuid: str, version=(2, 27), sees: int = 1) -> None:
    """In a worker: this process has a GPU of that name."""
    devices.device_info = lambda: DeviceInfo("2.7.0", "12.6", sees)
    nccl.member_device = lambda device: MemberDevice(uuid, version)
    nccl.CudaRuntime = Runtime
    reduce.is_on_gpu = lambda *tensors: any(tensor.dtype == torch.float64 for tensor in tensors)


def train(dies_at: int | None, shared: bool):
    me = link().worker
    pretend("shared" if shared else f"gpu {me}")
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    applied = []
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < STEPS:
            generator = torch.Generator().manual_seed(state.step)
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
            if (me, state.step) == (2, dies_at):
                die()
            optimizer.step()
            applied.append(state.step)
            state.step += 1
            state.commit()

    loop(state)
    reduction, weights = process.group().nccl, [round(p.sum().item(), 9) for p in model.parameters()]
    found = {"applied": applied, "size": hvd.size(), "nccl": reduction.used, "why": reduction.reason}
    return {**found, "model": weights, "connected": Runtime.connected}


@with_nccl
def test_a_peer_that_dies_in_the_middle_of_a_reduction_on_gpus_costs_no_step():
    results = together(train, 4, False, count=3, left=2)
    for result in results:
        assert result["size"] == 2
        assert result["nccl"], result["why"]
        assert result["connected"] == 2  # once in each world
        assert result["applied"] == sorted(set(result["applied"]))
    assert results[0]["model"] == results[1]["model"]
    assert list(range(STEPS)) in [result["applied"] for result in results]


def take_state(workers: int, dies: bool):
    """Train until there are so many workers, then two more steps; `dies`: in the middle of receiving the state."""
    pretend(f"gpu {link().worker}")
    Pg.dies_at = 2 if dies else None
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(800, 800), torch.nn.Linear(800, 2), torch.nn.BatchNorm1d(2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, left=3)

    @hvd.elastic.run
    def loop(state):
        while state.left:
            optimizer.zero_grad()
            model(torch.ones(4, 800, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            state.left -= hvd.size() == workers
            state.check_host_updates()

    loop(state)
    return [*(value.double().sum().item() for value in model.state_dict().values()), Pg.broadcasts]


@with_nccl
def test_a_newcomer_gets_tensors_by_nccl_and_its_death_meanwhile_changes_nothing():
    with WorldDriver(start_with=1) as driver:
        driver.start(take_state, 2, False)
        driver.wait(lambda: driver.world is not None)
        driver.start(take_state, 2, True)
        driver.wait(lambda: driver.world.round > 2)  # the survivor is alone again
        driver.start(take_state, 2, False)
        first, second = driver.results(2)
    assert first[:-1] == second[:-1]
    assert first[-1] > second[-1] > 2


def broadcast_beside_another_gpu():
    pretend(f"gpu {link().worker}")
    hvd.init()
    mine, value = process.group(), torch.full((3,), float(link().worker), dtype=torch.float64)
    mine.wait(mine.allreduce(value.clone(), hvd.Sum.gloo))
    if mine.rank:
        mine.nccl._device = torch.device("cuda:1")  # what was reduced was there
    broadcast_tensors([value], 0)
    return value.tolist(), Pg.broadcasts, mine.nccl.used


@with_nccl
def test_no_member_broadcasts_by_nccl_if_one_has_connected_another_gpu():
    assert together(broadcast_beside_another_gpu) == [([1.0] * 3, 0, True)] * 2


def test_tensor_stays_as_it_is_if_its_broadcast_by_nccl_is_aborted():
    class Aborted:
        rank = 1

        def broadcast(self, wire, root, by_nccl):
            wire.fill_(255)

        def wait(self, work):
            raise HorovodInternalError("the round is over")

    own = torch.ones(1 << 20)
    with pytest.raises(HorovodInternalError):
        _broadcast_on(own.device, Aborted(), [own], 0, True)
    assert own.unique().tolist() == [1.0]


def reduce_through_the_host():
    me = link().worker
    pretend("shared")
    hvd.init()
    mine = process.group()
    takes = mine.nccl.reduces(torch.zeros(3, dtype=torch.float64))
    reduce.is_on_gpu = lambda *tensors: False  # a copy is on the host
    sums = torch.full((3,), float(me))
    mine.wait(group.launch_staged(lambda copy: mine.allreduce(copy, hvd.Sum.gloo), sums))
    gathered = torch.zeros(mine.size, dtype=torch.int64)
    mine.wait(group.launch_staged(mine.allgather, gathered, torch.tensor([me])))
    return {"takes": takes, "why": mine.nccl.reason, "sums": sums.tolist(), "gathered": gathered.tolist()}


def test_workers_that_share_a_gpu_reduce_through_host_memory():
    results = together(reduce_through_the_host)
    for result in results:
        assert not result["takes"]
        assert "ranks 0 and 1 share one GPU" in result["why"]
        assert result["sums"] == [3.0, 3.0, 3.0]
        assert result["gathered"] == [1, 2]


def mixed():
    """Only the first has a GPU, and what lies there is reduced with what the other has on its CPU."""
    if link().worker == 1:
        pretend("its own")
    hvd.init()
    tensor = torch.full((4,), float(hvd.rank() + 1), dtype=torch.float32)
    mine = process.group()
    if link().worker == 1:
        work = group.launch_staged(lambda copy: mine.allreduce(copy, hvd.Sum.gloo), tensor)
    else:
        work = mine.allreduce(tensor, hvd.Sum.gloo)
    mine.wait(work)
    return {"gloo alone": (mine.nccl, mine.shared_memory) == (None, None), "sum": tensor.tolist()}


def test_all_members_use_gloo_if_only_some_have_a_gpu():
    results = together(mixed)
    for result in results:
        assert result == {"gloo alone": True, "sum": [3.0] * 4}


class Recorder:
    """In place of `CudaRuntime` and of what it connects."""

    calls: ClassVar[list[str]] = []

    def load(self, device):
        self.calls.append("load")

    def connect(self, store, rank, size, device):
        self.calls.append(f"connect {rank} of {size}")
        return self

    def reduce_once(self, pg, device):
        self.calls.append("reduce")

    def abort(self):
        self.calls.append("abort")


def join_with_a_gpu(rounds: int):
    """In a worker: ask for the device, and loop until there were so many worlds."""
    pretend("its own")
    operations.device_info = devices.device_info
    nccl.CudaRuntime = Recorder
    dist.is_nccl_available = lambda: True
    torch.cuda.set_device = lambda device: Recorder.calls.append("set_device")
    hvd.init()
    chosen = {str(hvd.device()) for _ in range(2)}
    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def loop(state):
        Recorder.calls.append("join")
        while process.assignment.world.round < rounds:
            hvd.allreduce(torch.ones(1, dtype=torch.float32))
            state.step += 1
            state.commit()

    loop(state)
    return chosen, Recorder.calls


def test_a_newcomer_alone_prepares_its_gpu_once_and_before_it_joins():
    with WorldDriver(start_with=1) as driver:
        driver.start(join_with_a_gpu, 2)
        driver.wait(lambda: driver.world is not None)
        driver.start(join_with_a_gpu, 2)
        (chosen, first), (_, newcomer) = driver.results(2)
    assert chosen == {"cuda:0"}
    assert first == ["set_device", "set_device", "join", "join"]
    assert newcomer == ["set_device", "load", "connect 0 of 1", "reduce", "abort", "set_device", "join"]
