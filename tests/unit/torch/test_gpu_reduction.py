"""Reductions of tensors on GPUs, without a GPU: tensors of float64 play those on a GPU, and a Gloo group plays NCCL.

What is real: the processes, their kills, the agreement, the waiting, the cut, and how the next world begins.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

import spark_elastic.torch as hvd
from spark_elastic.collective import group, reduce
from spark_elastic.collective.gpu import devices, nccl
from spark_elastic.collective.gpu.devices import DeviceInfo, MemberDevice
from spark_elastic.collective.gpu.nccl import NcclReductions
from spark_elastic.collective.process import process
from spark_elastic.errors import HorovodInternalError
from spark_elastic.torch import operations
from tests.unit.world_link import die, link
from tests.unit.worlds import WorldDriver

STEPS = 10


class Event:
    """Behind the kernels of a work, which never end if it has failed."""

    def __init__(self, work):
        self._work = work

    def query(self):
        return self._work.is_completed() and self._work.exception() is None


class Work:
    """As NCCL's: its `wait` does not block, and with an exception it is completed, too."""

    def __init__(self, work):
        self._work = work

    def wait(self):
        Runtime.waited_for = self
        return True

    def is_completed(self):
        return self._work.is_completed()

    def exception(self):
        return self._work.exception()


class Pg:
    aborted: ClassVar[list[Any]] = []
    """Kept: unlike NCCL's, a Gloo group's destructor waits for what is in flight, with Python's lock in its hands."""

    def __init__(self, pg):
        self._pg = pg

    def allreduce(self, tensors, options):
        return Work(self._pg.allreduce(tensors, options))

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


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < devices.OLDEST_TORCH_FOR_NCCL,
    reason="no NCCL, nor its stand-in",
)
def test_a_peer_that_dies_in_the_middle_of_a_reduction_on_gpus_costs_no_step():
    with WorldDriver(start_with=3) as driver:
        driver.start(train, 4, False, count=3)
        results = driver.results(2)
    for result in results:
        assert result["size"] == 2
        assert result["nccl"], result["why"]
        assert result["connected"] == 2  # once in each world
        assert result["applied"] == sorted(set(result["applied"]))
    assert results[0]["model"] == results[1]["model"]
    assert list(range(STEPS)) in [result["applied"] for result in results]


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
    with WorldDriver(start_with=2) as driver:
        driver.start(reduce_through_the_host, count=2)
        results = driver.results(2)
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
    with WorldDriver(start_with=2) as driver:
        driver.start(mixed, count=2)
        results = driver.results(2)
    for result in results:
        assert result == {"gloo alone": True, "sum": [3.0] * 4}


# --- one communicator, in this process ------------------------------------------------------------


class Never:
    """A work of a peer that is gone: it ends once the communicator is aborted, and leaves garbage."""

    def __init__(self):
        self.freed = threading.Event()

    def wait(self):
        return True

    def is_completed(self):
        return self.freed.is_set()

    def exception(self):
        return None


class Stub:
    def __init__(self, work):
        self.work = work
        self.aborted = threading.Event()

    def connect(self, store, rank, size, device):
        return self

    def reduce_once(self, pg, device):
        pass

    def allreduce(self, tensors, options):
        return self.work

    def mark(self, device):
        return Event(self.work)

    def abort(self):
        self.aborted.set()
        freed = getattr(self.work, "freed", None)
        if freed is not None:
            freed.set()


class Round:
    """What a group knows of its round, and what it was told of waits."""

    rank, size = 0, 2

    def __init__(self):
        self.why = None
        self.told = []
        self.stalled = threading.Event()

    def check_alive(self):
        if self.why is not None:
            raise HorovodInternalError(f"round 1 is over: {self.why}")

    def report_stall(self, begins):
        self.told.append(begins)
        self.stalled.set()

    def communicator(self, stub):
        made = NcclReductions(self, lambda: None)
        made._runtime = stub
        made.connect(torch.device("cuda", 0))
        return made


def test_a_cut_ends_a_wait_and_the_result_is_not_used():
    here, stub = Round(), Stub(Never())
    communicator = here.communicator(stub)
    work = communicator.allreduce(torch.zeros(2), dist.ReduceOp.SUM)

    def cut():
        here.stalled.wait(10)
        here.why = "a worker was lost"  # as `Group.cut`: first the reason, then the communicator
        communicator.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    with pytest.raises(HorovodInternalError, match="a worker was lost"):
        communicator.wait(work)
    cutting.join()
    assert stub.aborted.wait(10)
    assert here.told == [True, False]
    with pytest.raises(HorovodInternalError):
        communicator.allreduce(torch.zeros(2), dist.ReduceOp.SUM)


def test_an_nccl_error_is_a_horovod_internal_error():
    class Failed(Never):
        def is_completed(self):
            return True

        def exception(self):
            raise RuntimeError("ncclRemoteError")

    communicator = Round().communicator(Stub(Failed()))
    work = communicator.allreduce(torch.zeros(2), dist.ReduceOp.SUM)
    with pytest.raises(HorovodInternalError, match="NCCL failed: ncclRemoteError"):
        communicator.wait(work)


def refuses_to_say(work: Any) -> None:
    """Raise what `Work.exception()` of NCCL raises in torch before 2.13, for good and failed works alike."""
    raise TypeError(
        "Unable to convert function return value to a Python type! The signature was\n\t"
        "(self: torch._C._distributed_c10d.Work) -> std::__exception_ptr::exception_ptr"
    )


@pytest.mark.parametrize("answer", [refuses_to_say, lambda work: ValueError("busy"), lambda work: False])
def test_an_answer_that_names_no_nccl_error_is_no_failure(answer):
    class Slow(Never):
        """Completed, as far as torch knows, while kernels behind it run until it has been asked three times."""

        asked = 0

        def is_completed(self):
            self.asked += 1
            return True

        exception = answer

    class Busy(Stub):
        def mark(self, device):
            return self

        def query(self):
            return self.work.asked >= 3

    communicator = Round().communicator(Busy(Slow()))
    communicator.wait(communicator.allreduce(torch.zeros(2), dist.ReduceOp.SUM))


def cut_while_connecting(communicator: NcclReductions, here: Round, entered: threading.Event) -> None:
    """Connect, and end the round from another thread once `entered` is set."""

    def cut():
        entered.wait(10)
        here.why = "a worker was lost"
        communicator.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    with pytest.raises(HorovodInternalError, match="a worker was lost"):
        communicator.connect(torch.device("cuda", 0))
    cutting.join()


def test_a_cut_while_connecting_returns_at_once_and_a_late_communicator_is_aborted():
    here, stub, go = Round(), Stub(Never()), threading.Event()

    class Slow(Stub):
        def connect(self, store, rank, size, device):
            entered.set()
            go.wait(10)
            return stub

    entered = threading.Event()
    communicator = NcclReductions(here, lambda: None)
    communicator._runtime = Slow(None)

    cut_while_connecting(communicator, here, entered)
    assert not stub.aborted.is_set()
    go.set()
    assert stub.aborted.wait(10)


def test_a_cut_during_the_first_reduction_ends_it_by_an_abort():
    class Waiting(Stub):
        def reduce_once(self, pg, device):
            entered.set()
            assert pg.aborted.wait(10)
            raise RuntimeError("aborted")

    here, entered = Round(), threading.Event()
    communicator = NcclReductions(here, lambda: None)
    communicator._runtime = stub = Waiting(Never())

    cut_while_connecting(communicator, here, entered)
    assert stub.aborted.wait(10)


def test_nccl_does_not_connect_if_its_first_reduction_fails():
    class Failing(Stub):
        def reduce_once(self, pg, device):
            raise RuntimeError("ncclUnhandledCudaError")

    communicator = NcclReductions(Round(), lambda: None)
    communicator._runtime = Failing(None)
    with pytest.raises(RuntimeError, match="NCCL does not connect: ncclUnhandledCudaError"):
        communicator.connect(torch.device("cuda", 0))


class NcclWorld:
    """The communicators of a world as NCCL 2.31 ends them: an abort returns once all members have begun to abort."""

    def __init__(self, size):
        self.ways: list[str] = []
        self.all_abort = threading.Barrier(size + 1)  # with the test


class ProcessGroup:
    """In place of `dist.ProcessGroupNCCL`; its store is the world. What was not aborted is destroyed."""

    class Options:
        pass

    late = threading.Event()

    def __init__(self, store, rank, size, options):
        self.world, self.rank, self.aborted = store, rank, False

    def eager_connect_single_device(self, device):
        if self.rank == 2:
            raise RuntimeError("ncclSystemError")
        if self.rank == 3:
            assert self.late.wait(10)

    def abort(self):
        self.aborted = True
        self.world.ways.append("abort")
        self.world.all_abort.wait(20)

    def __del__(self):
        if not self.aborted:
            self.world.ways.append("destroy")


def test_each_way_out_of_an_nccl_world_aborts_and_none_destroys(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl.CudaRuntime, "reduce_once", lambda self, pg, device: None)
    world, rounds = NcclWorld(4), [Round() for _ in range(4)]
    for rank, here in enumerate(rounds):
        here.rank = rank
    members = [NcclReductions(here, lambda: world) for here in rounds]
    device = torch.device("cuda", 0)
    members[0].connect(device)
    members[1].connect(device)

    def connect(number):
        with pytest.raises((HorovodInternalError, RuntimeError)):
            members[number].connect(device)

    connecting = [threading.Thread(target=connect, args=(number,)) for number in (2, 3)]
    for thread in connecting:
        thread.start()
    members[0].cut()
    members[1].close()
    rounds[3].why = "a worker was lost"
    members[3].cut()  # while it connects
    ProcessGroup.late.set()
    world.all_abort.wait(20)
    for thread in connecting:
        thread.join(20)
    assert world.ways == ["abort"] * 4


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
