"""`join`: a rank that has no more data takes part in the others' collectives until they have no more data either.

A rank that has joined has to learn which collective comes next. That must cost nothing while no rank joins. So the
other ranks publish nothing until one of their collectives takes longer than `STALL_S`: then each of them starts a
thread that asks the driver, once, for a rank that has joined. Once there is one, they publish a description of each
collective, by number, in the round's key-value store; ranks that have joined wait for the next description and take
part with neutral values. When all ranks have joined, an end mark is published instead.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.reduce import GroupContext
from spark_elastic.errors import HorovodInternalError, SparkElasticError, UsageError
from spark_elastic.helper_thread import HelperThread
from spark_elastic.wire.worker_link import WorkerLink

FOREVER_S = 1e6
"""The time limit of a wait that only the end of the round ends."""
_END = b"end"


class CollectiveLog:
    """The last collectives of one group, by number; they are published once a rank has joined."""

    def __init__(self, link: WorkerLink, group: GroupContext) -> None:
        self._link, self._group = link, group
        self.count = 0
        self.joins = 0
        """The number of joins that all ranks have completed in this round; part of every key."""
        self._last: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=64)
        self._publishing = False
        self._asking = False

    def launched(self, name: str, tensor: torch.Tensor, argument: Any) -> None:
        """Record the launch of a collective. It is called for each of them, so it must cost almost nothing."""
        number, call = self.count, (name, tensor.dtype, tensor.numel(), tensor.device.type, argument)
        self._last.append((number, call))
        self.count += 1
        if self._publishing:  # read after the entry is in the list, see `_ask`
            self._publish(number, call)

    def stalled(self) -> None:
        """Start to ask the driver for a rank that has joined, since a collective takes long; repeats do nothing."""
        if not self._asking:
            self._asking = True
            HelperThread(self._ask, "join", (self.joins,)).start()

    def _ask(self, generation: int) -> None:
        try:
            since = self._link.kv_get(self._group.round, f"{self._prefix(generation)}/first", FOREVER_S)
            if generation != self.joins:
                return
            self._publishing = True
            # the launching thread publishes collectives from here on; the earlier ones are in the list
            for number, call in list(self._last):
                if number >= int(since):
                    self._publish(number, call)
        except SparkElasticError:  # the round has ended
            return

    def _publish(self, number: int, call: tuple[Any, ...]) -> None:
        plain = [part if isinstance(part, int) else str(part) for part in call]
        self._link.kv_set(self._group.round, self._key(number), json.dumps(plain).encode())

    def _key(self, number: int) -> str:
        return f"{self._prefix(self.joins)}/collective/{number}"

    def _prefix(self, generation: int) -> str:
        # with the name: a rank that has joined in one group must not take part in the collectives of another
        return f"join/{self._group.name}/{generation}"

    # --- the rank that joins ------------------------------------------------------------------

    @in_one_thread
    def join(self) -> int:
        """Take part in the others' collectives until all have joined; return the rank that joined last."""
        prefix = self._prefix(self.joins)
        self._publishing = False
        self._link.kv_set(self._group.round, f"{prefix}/first", str(self.count).encode())
        counts: list[int] = []
        waits = HelperThread(self._end_when_all_have, "join", (prefix, self.count, counts))
        waits.start()
        while (call := self._link.kv_get(self._group.round, self._key(self.count), FOREVER_S)) != _END:
            _contribute_neutral(self._group, *json.loads(call))
        waits.join()
        if not counts:  # the round has ended between the end mark and the others' counts
            raise HorovodInternalError(f"round {self._group.round} ended while its ranks were in hvd.join()")
        self.joins += 1
        self._asking = False
        return max(range(self._group.size), key=lambda rank: (counts[rank], rank))

    def _end_when_all_have(self, prefix: str, count: int, counts: list[int]) -> None:
        """Put the number of collectives that each rank had launched when it joined into `counts`, and end the join."""
        group = self._group
        try:
            found = self._link.gather(group.round, prefix, group.rank, group.size, str(count), FOREVER_S)
            counts += map(int, found)
            self._link.kv_set(group.round, f"{prefix}/collective/{max(counts)}", _END)
        except (SparkElasticError, TimeoutError):
            return


def _contribute_neutral(group: GroupContext, name: str, type_name: str, count: int, device: str, argument: Any) -> None:
    """Take part in one collective of the others, see `CollectiveLog.launched`, with neutral values."""
    dtype = getattr(torch, type_name.removeprefix("torch."))
    if name == "allreduce":
        operator = getattr(dist.ReduceOp, argument.rsplit(".", 1)[-1])
        # on the same kind of device: it decides which backend reduces the tensor
        tensor = torch.full((count,), _neutral(argument, dtype), dtype=dtype, device=device)
        group.wait(group.allreduce(tensor, operator))
    elif name == "allgather":
        tensor = torch.zeros(count, dtype=dtype, device="cpu")
        group.wait(group.allgather(tensor.new_empty(count * group.size), tensor))
    elif name == "broadcast" and argument != group.rank:
        on_gpu = device != "cpu"
        group.wait(group.broadcast(torch.empty(count, dtype=dtype, device=device), argument, by_nccl=on_gpu))
    else:
        raise UsageError(
            f"another rank has called {name}, in which a rank that waits in hvd.join() cannot take part; "
            "while a rank has joined, only allreduce, allgather and broadcast from a rank that has not joined are "
            "possible"
        )


def _neutral(operator: str, dtype: torch.dtype) -> Any:
    if "SUM" in operator:
        return 0
    if "PRODUCT" in operator:
        return 1
    if dtype is torch.bool:
        return "MIN" in operator
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.max if "MIN" in operator else limits.min
