"""What the collectives of a round are called on: Gloo, and below its reductions shared memory where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.host_group import HostGroup, SharedWork
from spark_elastic.collective.meeting import meet
from spark_elastic.worker_link import WorkerLink


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

    def connect(self) -> None:
        super().connect()
        if len(set(self._hosts)) > 1:
            return
        try:
            self._shared = meet(self, self._link)
        except BaseException:
            self.close()
            raise

    def allreduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Any:
        shared = self._shared
        if shared is None or not shared.takes(tensor, op):
            return super().allreduce(tensor, op)
        self.check_alive()
        self.log.launched("allreduce", tensor, op)
        return shared.launch(tensor, op)

    def wait(self, work: Any) -> None:
        if isinstance(work, SharedWork):
            self.check_alive()
            assert self._shared is not None
            self._shared.wait(work)
        else:
            super().wait(work)

    def cut(self, why: str) -> None:
        super().cut(why)
        if self._shared is not None:
            self._shared.interrupt()

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.close()

    def _close_in_child(self) -> None:
        super()._close_in_child()
        if self._shared is not None:
            self._shared.close_in_child()
