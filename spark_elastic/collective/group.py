"""The group of a world's members, or of some of them: collectives on tensors, and their end."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective import reduce
from spark_elastic.collective.gloo.process_group import GlooCollectives
from spark_elastic.collective.gpu.nccl import NcclReductions, NcclWork
from spark_elastic.collective.joining import CollectiveLog
from spark_elastic.collective.negotiation import Negotiation
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.reduce import Fill
from spark_elastic.collective.shared_memory.reducer import SharedMemoryReducer
from spark_elastic.errors import HorovodInternalError
from spark_elastic.wire.worker_link import WorkerLink


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, shape (bytes,), in the same memory; Gloo lacks some of torch's types."""
    if not tensor.numel():  # an empty tensor may have a stride of 0, which cannot be viewed as another type
        return tensor.new_empty(0, dtype=torch.uint8)
    # not `view(-1)`: a single element counts as contiguous whatever its stride is, and would keep that stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Waited:
    """The seconds that this process has waited for collectives."""

    seconds = 0.0


waited = Waited()


class StagedWork(NamedTuple):
    """A collective on copies, in the host's memory, of tensors that are on a GPU."""

    inner: Any
    """The collective that was launched on the copies."""
    copy_back: Callable[[], object]
    """Copies the result to the GPU; called once `inner` is done."""

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())


def launch_staged(collective: Callable[..., Any], result: torch.Tensor, *inputs: torch.Tensor) -> StagedWork:
    """Call `collective` with copies of `result` and `inputs` in the host's memory; `wait` copies the result back."""
    copies = [_to_host(tensor.detach()) for tensor in (result, *inputs)]
    return StagedWork(collective(*copies), lambda: result.copy_(copies[0], non_blocking=result.is_cuda))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory that CUDA cannot page out: copies between it and a GPU are several times as fast.

    torch keeps such memory, and uses it again once copies from it that were queued are done.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


class Group:
    """The members that one round connects under a name; made by `world.connect`.

    One thread uses it; `cut`, which ends it, may be called from any thread. All members launch its collectives in the
    same order, and wait for them in any order. Each launch returns the work to wait for.
    """

    def __init__(self, link: WorkerLink, round: int, name: str, rank: int, world_ranks: Sequence[int]) -> None:
        self.round = round
        self.rank = rank
        self.size = len(world_ranks)
        self.name = name
        self.world_ranks = world_ranks
        self.objects = 0
        """The number of object collectives so far. Their MACs cover it, so that no message can be replayed."""
        self.notes: list[str] = []
        """The texts that the members have sent one another when they connected, by rank."""
        self.why: str | None = None
        """The reason why the group is over; None while it is in use."""
        self.log = CollectiveLog(link, self)
        self.negotiation = Negotiation(self)
        self.gloo = GlooCollectives(self)
        self.shared_memory: SharedMemoryReducer | None = None
        self.nccl: NcclReductions | None = None
        """The ways to reduce; None: the members cannot use it."""
        self._link = link
        open_groups.add(self)

    # --- reductions: the ways are in `reduce` -----------------------------------------------------

    @in_one_thread
    def allreduce(self, tensor: torch.Tensor, op: Any, fill: Fill | None = None) -> Any:
        """Launch an in-place all-reduce of a contiguous tensor, done after `wait`; `fill` may write the input."""
        self.negotiation.settle()
        on_gpu = reduce.is_on_gpu(tensor)
        special: NcclReductions | SharedMemoryReducer | None = self.nccl if on_gpu else self.shared_memory
        way = special if special is not None and special.reduces(tensor, op) else None
        if way is None and on_gpu:
            if fill is not None:
                fill(tensor, 0)
            return launch_staged(lambda copy: self.allreduce(copy, op), tensor)
        self.check_alive()
        self.log.launched("allreduce", tensor, op)
        return (way or self.gloo).allreduce(tensor, op, fill)

    @in_one_thread
    def broadcast(self, tensor: torch.Tensor, root: int, by_nccl: bool = False) -> Any:
        """Launch a broadcast of the tensor of rank `root`; `by_nccl`: see `uses_nccl`."""
        if reduce.is_on_gpu(tensor) and not by_nccl:
            return launch_staged(lambda copy: self.broadcast(copy, root), tensor)
        self.negotiation.settle()
        self.check_alive()
        self.log.launched("broadcast", tensor, root)
        way = self.nccl if by_nccl and self.nccl is not None else self.shared_memory or self.gloo
        return way.broadcast(as_bytes(tensor), root)

    def may_use_nccl(self, devices: Set[torch.device]) -> bool:
        """Return True if this member has its tensors on one GPU, and NCCL has not connected another one."""
        return len(devices) == 1 and self.nccl is not None and self.nccl.fits(*devices)

    @in_one_thread
    def uses_nccl(self, device: torch.device) -> bool:
        """Return True, on all members, if they can use NCCL; all call this with the device of tensors on their GPUs."""
        if self.nccl is not None and not self.nccl.reason:  # a reduction decides it, also for ranks that have joined
            self.wait(self.allreduce(torch.zeros(1, dtype=torch.float64, device=device), dist.ReduceOp.SUM))
        return self.nccl is not None and self.nccl.used

    # --- collectives that Gloo alone has ----------------------------------------------------------

    @in_one_thread
    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Launch an all-gather of tensors of equal size; `out` receives them in rank order."""
        if reduce.is_on_gpu(out, tensor):
            return launch_staged(self.allgather, out, tensor)
        self.negotiation.settle()
        self.log.launched("allgather", tensor, None)
        return self.gloo.launch("_allgather_base", out, tensor)

    @in_one_thread
    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]) -> Any:
        """Launch an all-to-all. `received` and `sent` count the rows from and to each member."""
        if reduce.is_on_gpu(out, tensor):
            return launch_staged(lambda out, tensor: self.alltoall(out, tensor, received, sent), out, tensor)
        self.negotiation.settle()
        self.log.launched("alltoall", tensor, None)
        return self.gloo.launch("alltoall_base", out, tensor, received, sent)

    @in_one_thread
    def exchange(self, mine: bytes, *, serve: bool = False) -> list[bytes]:
        """Return the bytes of all members, which must have equal lengths; see `reduce.GroupContext.exchange`."""
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        everyone = sent.new_empty((self.size, sent.numel()))
        work = self.gloo.launch("_allgather_base", everyone.view(-1), sent)
        if serve:
            self.negotiation.serve(work.is_completed)
        self.wait(work)
        return [row.numpy().tobytes() for row in everyone]

    @in_one_thread
    def wait(self, work: Any) -> None:
        """Block until a launched collective is done. Raise HorovodInternalError if a peer or the round is gone."""
        if isinstance(work, StagedWork):
            self.wait(work.inner)
            work.copy_back()
            return
        began = clock.monotonic()
        try:
            getattr(work, "way", self.gloo).wait(work)  # a work of torch's names no way: it is Gloo's
        finally:
            waited.seconds += clock.monotonic() - began

    @in_one_thread
    def wait_each(self, works: Sequence[Any], receive: Callable[[int, bool], None], may_queue: bool) -> None:
        """Wait for reductions in their order, and call `receive(number, queued)` for each.

        `queued`: the result is there for later work on the GPU's stream alone, and this waits for that work too, once
        for all reductions. So `receive` must only put work on the stream; `may_queue`: it can.
        """
        if may_queue and works and all(isinstance(work, NcclWork) for work in works):
            works[0].way.wait_each(works, receive)
            return
        for number, work in enumerate(works):
            self.wait(work)
            receive(number, False)

    # --- the end ----------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise HorovodInternalError if the group was closed, or the driver has ended the round."""
        if self.why is not None:
            raise HorovodInternalError(f"round {self.round} is over: {self.why}")
        self._link.check_cut(self.round)

    def report_stall(self, begins: bool) -> None:
        """Report the beginning or the end of a long wait to the driver, and look for ranks that have joined."""
        if begins:
            self.log.stalled()
        self._link.blocked(begins)

    def _ways(self) -> list[GlooCollectives | SharedMemoryReducer | NcclReductions]:
        return [way for way in (self.gloo, self.shared_memory, self.nccl) if way is not None]

    def cut(self, why: str) -> None:
        """End the group at once, from any thread: blocked and later collectives raise HorovodInternalError."""
        self.why = self.why or why
        for way in self._ways():
            way.cut()

    def close(self) -> None:
        """Disconnect and free everything; safe to repeat. Collectives in flight fail."""
        self.why = self.why or "the group was closed"
        self.negotiation.close()
        for way in self._ways():
            way.close()
        open_groups.discard(self)

    def close_in_child(self) -> None:
        self.why = "this is a forked child"
        for way in self._ways():
            way.close_in_child()


open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for group in list(open_groups):
        group.close_in_child()


# A data loader's forked worker would otherwise keep its parent's connections open when the parent is killed, and the
# parent's peers would not notice until that worker has ended too.
os.register_at_fork(after_in_child=_close_all_in_child)
