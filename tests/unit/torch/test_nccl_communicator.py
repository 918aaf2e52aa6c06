"""One NCCL communicator in this process, without a GPU: its waits, its cut, and the ways in which it is connected."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spark_elastic.collective.gpu import nccl
from spark_elastic.collective.gpu.nccl import NcclReductions
from spark_elastic.errors import HorovodInternalError


class Event:
    """Behind the kernels of a work, which never end if it has failed."""

    def __init__(self, work):
        self._work = work

    def query(self):
        return self._work.is_completed() and self._work.exception() is None


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
