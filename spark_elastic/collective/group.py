"""The group that a round's collectives run on: Gloo, with faster reductions through shared memory and NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective.calls import as_bytes
from spark_elastic.collective.combining import combinable
from spark_elastic.collective.exchange import ExchangeWork
from spark_elastic.collective.gloo import Fill, GlooGroup, LinkStore
from spark_elastic.collective.gloo_shutdown import has_ended
from spark_elastic.collective.gpu_reduction import GpuReduction, NcclWork
from spark_elastic.collective.joining import STALL_S, CollectiveLog
from spark_elastic.collective.shared_memory import find_peers
from spark_elastic.collective.shared_memory_reducer import (
    SLICED_FROM_BYTES,
    Root,
    SharedMemoryReducer,
    SharedWork,
    SpinWait,
    serve_peers,
)
from spark_elastic.wire.worker_link import WorkerLink

log = logging.getLogger("spark_elastic.collective")

_TURN_S = 1e-3
_TURN = timedelta(seconds=_TURN_S)
"""The time to wait for Gloo before this member looks again for others that wait for its slices."""

MOST_BYTES_BETWEEN_HOSTS = 1 << 20
"""With several hosts, larger tensors go through Gloo. Measured with two hosts of two workers on one bridge and two
cores: up to 1 MB, shared memory takes 0.6 to 0.8 of Gloo's time; from 2 MB on, 1.1 to 1.3."""


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

    Args:
        link, round, name, rank, addresses: see `GlooGroup`.
        hosts: the members' hosts, in the order of their ranks in this group.
    """

    def __init__(
        self, link: WorkerLink, round: int, name: str, rank: int, addresses: Sequence[str], hosts: Sequence[str]
    ) -> None:
        super().__init__(link, round, name, rank, addresses)
        self._hosts = list(hosts)
        self._shared: SharedMemoryReducer | None = None
        self._between: GlooGroup | None = None
        self._gpu = GpuReduction(self, lambda: LinkStore(link, round, f"nccl/{name}/"), serve_peers, STALL_S)
        self._most_bytes: int | None = None
        """Larger tensors are reduced by Gloo; None: no limit."""

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
        """Return True if there are members that could share memory; the answer is the same on all of them."""
        if len(set(self._hosts)) == self.size:
            return False
        if len(self.kinds) > 1:
            log.warning("some workers of this world may use GPUs and others have none: all reductions go through Gloo")
            return False
        return True

    def _share_memory(self) -> SharedMemoryReducer | None:
        """Find the members on this host and connect the hosts; return None, on all members alike, if that fails."""
        hosts = list(dict.fromkeys(self._hosts))
        members = {host: [rank for rank, of in enumerate(self._hosts) if of == host] for host in hosts}
        owners = min(map(len, members.values()))
        found = find_peers(self, self._link, self._hosts)
        if found is None:
            return None
        try:
            if len(hosts) > 1 and found.rank < owners:
                self._connect_between(found.rank, [members[host][found.rank] for host in hosts])
        except BaseException:
            found.close()
            raise
        wait = SpinWait(self.check_alive, self.report_stall, serve_peers)
        # slices need a second wait, which is worth it if all members can combine theirs at the same time
        several = len(hosts) > 1
        self._most_bytes = MOST_BYTES_BETWEEN_HOSTS if several and not found.demanded else None
        sliced_from = 0 if several else SLICED_FROM_BYTES if 4 <= len(found.peers) + 1 <= found.cores else None
        return SharedMemoryReducer(found, self.round, wait, owners, sliced_from, self._between)

    def _connect_between(self, slice_number: int, ranks: Sequence[int]) -> None:
        """Connect to the members on other hosts that own the same slice."""
        addresses = [self._addresses[rank] for rank in ranks]
        name = f"{self.name}/slice/{slice_number}"
        between = GlooGroup(self._link, self.round, name, ranks.index(self.rank), addresses)
        between.log = _SilentLog(self.log)  # type: ignore[assignment]
        self._between = between
        if self._why is not None:  # later cuts find it in `_between`
            between.cut(self._why)
        between.connect()

    def allreduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, fill: Fill | None = None) -> Any:
        self._settle()
        if is_on_gpu(tensor):
            if fill is not None:
                fill(tensor, 0)
            return self._allreduce_on_gpu(tensor, op)
        shared = self._shared
        if shared is None or not combinable(tensor, op) or self._is_too_large(tensor):
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

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        if is_on_gpu(tensor):
            return launch_staged(lambda copy: self.broadcast(copy, root), tensor)
        if self._shared is None:
            return super().broadcast(tensor, root)
        self._settle()
        self.check_alive()
        self.log.launched("broadcast", tensor, root)
        return self._shared.launch_broadcast(as_bytes(tensor), self._root(root))

    def _root(self, rank: int) -> Root:
        host = self._hosts[rank]
        number = list(dict.fromkeys(self._hosts)).index(host)
        here = host == self._hosts[self.rank]
        return Root(self._hosts[:rank].count(host) if here else None, number)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        if is_on_gpu(out, tensor):
            return launch_staged(self.allgather, out, tensor)
        return super().allgather(out, tensor)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]) -> Any:
        if is_on_gpu(out, tensor):
            return launch_staged(lambda to, of: self.alltoall(to, of, received, sent), out, tensor)
        return super().alltoall(out, tensor, received, sent)

    def _is_too_large(self, tensor: torch.Tensor) -> bool:
        return self._most_bytes is not None and tensor.numel() * tensor.element_size() > self._most_bytes

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
        if self._shared is not None and self._shared.others_wait and not isinstance(work, ExchangeWork):
            self._take_turns(work)
        super().wait(work)  # of an `ExchangeWork`, it calls this method for the exchange

    def _take_turns(self, work: dist.Work) -> None:
        """Wait up to `STALL_S` for Gloo, and meanwhile do the work that other members may wait for."""
        until = clock.monotonic() + STALL_S
        try:
            while clock.monotonic() < until and not has_ended(work, _TURN):
                serve_peers()
        except RuntimeError:  # `wait` raises it again, translated
            return

    def _while_waiting(self) -> None:
        serve_peers()

    def cut(self, why: str) -> None:
        super().cut(why)
        if self._between is not None:
            self._between.cut(why)
        if self._shared is not None:
            self._shared.interrupt()
        self._gpu.cut()

    def close(self) -> None:
        super().close()
        self._gpu.cut()
        if self._between is not None:
            self._between.close()
        if self._shared is not None:
            self._shared.close()

    def _close_in_child(self) -> None:
        super()._close_in_child()
        self._gpu.close_in_child()
        if self._shared is not None:
            self._shared.close_in_child()


class _SilentLog:
    """The log of collectives that are parts of others: ranks that have joined must only see the whole ones."""

    def __init__(self, whole: CollectiveLog) -> None:
        self.stalled = whole.stalled

    def launched(self, name: str, tensor: torch.Tensor, argument: Any) -> None:
        """Do nothing: the whole collective was already recorded."""
