"""The group that a round's collectives run on: Gloo, with faster reductions through shared memory and NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic.collective.calls import as_bytes
from spark_elastic.collective.combining import combinable
from spark_elastic.collective.gloo import Fill, GlooGroup, LinkStore
from spark_elastic.collective.gpu_reduction import GpuReduction, NcclWork
from spark_elastic.collective.joining import STALL_S
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.shared_memory import find_peers
from spark_elastic.collective.shared_memory_reducer import (
    SharedMemoryReducer,
    SharedWork,
    SpinWait,
)
from spark_elastic.wire.worker_link import WorkerLink

log = logging.getLogger("spark_elastic.collective")


# --- host staging: collectives on tensors of a GPU through copies in this host's memory ------------------


class StagedWork(NamedTuple):
    """A collective on copies in the host's memory."""

    inner: Any
    """The collective that was launched on the copies."""
    copy_back: Callable[[], object]
    """Copies the result to the GPU; called once `inner` is done."""

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())


def is_on_gpu(*tensors: torch.Tensor) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)


def launch_staged(collective: Callable[..., Any], result: torch.Tensor, *inputs: torch.Tensor) -> StagedWork:
    """Call `collective` with copies of `result` and `inputs` in the host's memory; `wait` copies the result back."""
    copies = [tensor.detach().to("cpu", copy=True) for tensor in (result, *inputs)]
    return StagedWork(collective(*copies), lambda: result.copy_(copies[0]))


# --- the group --------------------------------------------------------------------------------------


class Group(GlooGroup):
    """A `GlooGroup` that selects the fastest way for each reduction: shared memory, NCCL or Gloo.

    `hosts` are the members' hosts, in the order of their ranks in this group.
    """

    def __init__(
        self, link: WorkerLink, round: int, name: str, rank: int, addresses: Sequence[str], hosts: Sequence[str]
    ) -> None:
        super().__init__(link, round, name, rank, addresses)
        self._hosts = list(hosts)
        self._shared: SharedMemoryReducer | None = None
        self._gpu = GpuReduction(self, lambda: LinkStore(link, round, f"nccl/{name}/"), STALL_S)

    def connect(self) -> None:
        """Connect all members to one another; see `GlooGroup.connect`. Then find those that can share memory."""
        try:
            super().connect()
            if self._may_share_memory():
                self._shared = self._share_memory()
        except BaseException:
            self.close()
            raise

    def _may_share_memory(self) -> bool:
        """Return True if all members could share memory, on one host; the answer is the same on all of them."""
        if len(self.kinds) > 1:
            log.warning("some workers of this world may use GPUs and others have none: all reductions go through Gloo")
            return False
        return self.size > 1 and len(set(self._hosts)) == 1

    def _share_memory(self) -> SharedMemoryReducer | None:
        """Find the other members' memory; return None, on all members alike, if that fails."""
        found = find_peers(self, self._link)
        if found is None:
            return None
        return SharedMemoryReducer(found, self.round, SpinWait(self.check_alive, self.report_stall))

    @in_one_thread
    def allreduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, fill: Fill | None = None) -> Any:
        self._settle()
        if is_on_gpu(tensor):
            if fill is not None:
                fill(tensor, 0)
            return self._allreduce_on_gpu(tensor, op)
        shared = self._shared
        if shared is None or not combinable(tensor, op):
            return super().allreduce(tensor, op, fill)
        self.check_alive()
        self.log.launched("allreduce", tensor, op)
        return shared.launch(tensor, op, fill)

    def _allreduce_on_gpu(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Any:
        if self.kinds == {"gpu"} and self._gpu.takes(tensor):
            self.check_alive()
            self.log.launched("allreduce", tensor, op)
            return self._gpu.launch(tensor, op)
        return launch_staged(lambda copy: self.allreduce(copy, op), tensor)

    @in_one_thread
    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        if is_on_gpu(tensor):
            return launch_staged(lambda copy: self.broadcast(copy, root), tensor)
        if self._shared is None:
            return super().broadcast(tensor, root)
        self._settle()
        self.check_alive()
        self.log.launched("broadcast", tensor, root)
        return self._shared.launch_broadcast(as_bytes(tensor), root)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        if is_on_gpu(out, tensor):
            return launch_staged(self.allgather, out, tensor)
        return super().allgather(out, tensor)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]) -> Any:
        if is_on_gpu(out, tensor):
            return launch_staged(lambda to, of: self.alltoall(to, of, received, sent), out, tensor)
        return super().alltoall(out, tensor, received, sent)

    @in_one_thread
    def wait(self, work: Any) -> None:
        if isinstance(work, StagedWork):
            self.wait(work.inner)
            work.copy_back()
            return
        if isinstance(work, NcclWork):
            self._gpu.wait(work)
            return
        if isinstance(work, SharedWork):
            self.check_alive()
            assert self._shared is not None
            self._shared.wait(work)
            return
        super().wait(work)

    def cut(self, why: str) -> None:
        super().cut(why)
        if self._shared is not None:
            self._shared.interrupt()
        self._gpu.cut()

    def close(self) -> None:
        super().close()
        self._gpu.cut()
        if self._shared is not None:
            self._shared.close()

    def _close_in_child(self) -> None:
        super()._close_in_child()
        self._gpu.close_in_child()
        if self._shared is not None:
            self._shared.close_in_child()
