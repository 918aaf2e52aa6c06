"""What the collectives of a round are called on: Gloo, and below its reductions shared memory and NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective.gloo import Fill, GlooGroup, LinkStore
from spark_elastic.collective.gpu_reduction import GpuReduction
from spark_elastic.collective.in_flight import has_ended
from spark_elastic.collective.joining import STALL_S, CollectiveLog
from spark_elastic.collective.nccl import NcclWork
from spark_elastic.collective.shared_memory.peers import base, meet
from spark_elastic.collective.shared_memory.reducer import SLICED_FROM_BYTES, HostGroup, SharedWork, take_part
from spark_elastic.collective.shared_memory.spin_wait import Waiting
from spark_elastic.wire.worker_link import WorkerLink

# Collectives on tensors of a GPU that go through this host's memory: what Gloo and shared memory can take.


class HostWork:
    """A collective on copies. `bring_back` is called once `inner` is done.

    inner: what was launched on the copies.
    """

    def __init__(self, inner: Any, bring_back: Callable[[], None]) -> None:
        self.inner = inner
        self.bring_back = bring_back

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())


def is_elsewhere(*tensors: torch.Tensor) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)


def launch_on_host(collective: Callable[..., Any], result: torch.Tensor, *inputs: torch.Tensor) -> HostWork:
    """Call `collective` with copies of the tensors, the result's first; its copy becomes `result` in the end."""
    copies = [_copy(tensor) for tensor in (result, *inputs)]
    work = collective(*copies)
    return HostWork(work, lambda: _copy_back(result, copies[0]))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_back(result: torch.Tensor, copy: torch.Tensor) -> None:
    result.copy_(copy)


log = logging.getLogger("spark_elastic.collective")

_kept_in_child: list[Any] = []
_TURN = timedelta(seconds=1e-3)
"""How long to wait for Gloo before looking whether others wait for this member's slices."""

MOST_BYTES_BETWEEN_HOSTS = 1 << 20
"""Measured with two hosts of two workers on one bridge and two cores: up to 1 MB the way through memory takes 0.6 to
0.8 of Gloo's time, from 2 MB on 1.1 to 1.3."""


class Group(GlooGroup):
    """As `GlooGroup`; who reduces a tensor does not know which way it goes.

    Args:
        hosts: of the members, in the order of their ranks in this group.
    """

    def __init__(
        self, link: WorkerLink, round: int, name: str, rank: int, addresses: Sequence[str], hosts: Sequence[str]
    ) -> None:
        super().__init__(link, round, name, rank, addresses)
        self._hosts = list(hosts)
        self._shared: HostGroup | None = None
        self._between: GlooGroup | None = None
        self._gpu = GpuReduction(
            self,
            lambda: LinkStore(link, round, f"nccl/{name}/", []),
            self.log.stalled,
            link.blocked,
            take_part,
            STALL_S,
        )
        self._most_bytes: int | None = None
        """Larger tensors are left to Gloo; None: none is."""

    def connect(self) -> None:
        super().connect()
        try:
            self._shared = self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> HostGroup | None:
        hosts = list(dict.fromkeys(self._hosts))
        members = {host: [rank for rank, of in enumerate(self._hosts) if of == host] for host in hosts}
        if len(hosts) == self.size:
            return None
        if len(self.kinds) > 1:
            log.warning("some workers of this world may use GPUs and others have none: all reductions go through Gloo")
            return None
        met = meet(self, self._link, self._hosts)
        if met is None:
            return None
        try:
            owners = min(map(len, members.values()))
            if len(hosts) > 1 and met.rank < owners:
                ranks = [members[host][met.rank] for host in hosts]
                self._connect_between(met.rank, ranks)
        except BaseException:
            met.close()
            raise
        waiting = Waiting(self.check_alive, self.log.stalled, self._link.blocked)
        # waiting twice is worth it if everybody can do its share at the same time
        several = len(hosts) > 1
        self._most_bytes = MOST_BYTES_BETWEEN_HOSTS if several and not met.demanded else None
        sliced_from = 0 if several else SLICED_FROM_BYTES if 4 <= len(met.peers) + 1 <= met.cores else None
        return HostGroup(met, base(self.round), waiting, owners, sliced_from, self._between)

    def _connect_between(self, slice_number: int, ranks: Sequence[int]) -> None:
        """Connect to the members of other hosts that own the same slice."""
        addresses = [self._addresses[rank] for rank in ranks]
        name = f"{self.name}/slice/{slice_number}"
        between = GlooGroup(self._link, self.round, name, ranks.index(self.rank), addresses)
        between.log = _WithoutNumbers(self.log)  # type: ignore[assignment]
        self._between = between
        if self._why is not None:  # a cut that comes from here on finds the group
            between.cut(self._why)
        between.connect()

    def allreduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, fill: Fill | None = None) -> Any:
        self._settle()
        if is_elsewhere(tensor):
            if fill is not None:
                fill(tensor, 0)
            return self._allreduce_elsewhere(tensor, op)
        shared = self._shared
        if shared is None or not shared.takes(tensor, op) or self._is_for_gloo(tensor):
            return super().allreduce(tensor, op, fill)
        self.check_alive()
        self.log.launched("allreduce", tensor, op)
        return shared.launch(tensor, op, fill)

    def _allreduce_elsewhere(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Any:
        if self.kinds == {"gpu"} and self._gpu.takes(tensor):
            self.check_alive()
            self.log.launched("allreduce", tensor, op)
            return self._gpu.launch(tensor, op)
        return launch_on_host(lambda copy: self.allreduce(copy, op), tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        if is_elsewhere(tensor):
            return launch_on_host(lambda copy: self.broadcast(copy, root), tensor)
        return super().broadcast(tensor, root)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        if is_elsewhere(out, tensor):
            return launch_on_host(self.allgather, out, tensor)
        return super().allgather(out, tensor)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]) -> Any:
        if is_elsewhere(out, tensor):
            return launch_on_host(lambda to, of: self.alltoall(to, of, received, sent), out, tensor)
        return super().alltoall(out, tensor, received, sent)

    def _is_for_gloo(self, tensor: torch.Tensor) -> bool:
        return self._most_bytes is not None and tensor.numel() * tensor.element_size() > self._most_bytes

    def wait(self, work: Any) -> None:
        if isinstance(work, HostWork):
            self.wait(work.inner)
            work.bring_back()
            return
        if isinstance(work, NcclWork):
            self._gpu.wait(work)
            return
        if isinstance(work, SharedWork):
            self.check_alive()
            assert self._shared is not None
            self._shared.wait(work)
            return
        if self._shared is not None and self._shared.others_wait:
            self._take_turns(work)
        super().wait(work)

    def _take_turns(self, work: dist.Work) -> None:
        """Wait a while for Gloo, and take part meanwhile in what others may be waiting for."""
        until = clock.monotonic() + STALL_S
        try:
            while clock.monotonic() < until and not has_ended(work, _TURN):
                take_part()
        except RuntimeError:  # raised again, and translated, by who waits for it
            return

    def _while_waiting(self) -> None:
        take_part()

    def cut(self, why: str) -> None:
        super().cut(why)
        if self._between is not None:
            self._between.cut(why)
        if self._shared is not None:
            self._shared.interrupt()
        self._gpu.cut()

    def close(self) -> None:
        super().close()
        self._gpu.close()
        if self._between is not None:
            self._between.close()
        if self._shared is not None:
            self._shared.close()

    def _close_in_child(self) -> None:
        super()._close_in_child()
        _kept_in_child.extend(self._gpu.close_in_child())
        if self._shared is not None:
            self._shared.close_in_child()


class _WithoutNumbers:
    """The log of collectives that are parts of others: a rank that has joined is told of those only."""

    def __init__(self, whole: CollectiveLog) -> None:
        self.stalled = whole.stalled

    def launched(self, name: str, tensor: torch.Tensor, argument: Any) -> None:
        """Is part of one that has been noted."""
