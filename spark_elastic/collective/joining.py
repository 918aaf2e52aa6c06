"""`join`: a rank that has run out of data takes part in the others' collectives until they have, too.

Collectives here are not negotiated, so a rank that has joined has to be told which one comes next. That must not cost
anything while nobody joins. So nothing is said until a collective has been waited for longer than `STALL_S`: then each
active rank has a thread ask the driver, once, whether anybody has joined. From the moment it learns of one, it leaves a
description of each collective, by number, in the round's key-value store; ranks that have joined wait for the next
description and take part with neutral values. When all have joined, somebody leaves an end there instead.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from spark_elastic.errors import SparkElasticError, UsageError
from spark_elastic.wire.worker_link import WorkerLink

if TYPE_CHECKING:
    from spark_elastic.collective.gloo import GlooGroup

STALL_S = 0.25
"""A collective that takes longer makes a rank ask whether anybody has joined."""
_FOREVER_S = 1e6
_END = b"end"


class CollectiveLog:
    """The collectives of one group by number: the last ones, and whether others need to read of them."""

    def __init__(self, link: WorkerLink, round: int, group: str, rank: int, size: int) -> None:
        self.count = 0
        self._link = link
        self._round = round
        self._rank = rank
        self._size = size
        self._name = group
        self._generation = 0
        """Joins that everybody has completed in this round; part of every key."""
        self._last: deque[tuple[int, dict[str, Any]]] = deque(maxlen=64)
        self._publishing = False
        self._asking = False

    def launched(self, name: str, tensor: torch.Tensor, argument: Any) -> None:
        """A collective is being launched. Called for every one of them: must cost next to nothing."""
        kind = (tensor.dtype, tensor.numel(), tensor.device.type)
        entry = (self.count, {"name": name, "tensor": kind, "argument": argument})
        self._last.append(entry)
        self.count += 1
        if self._publishing:  # read after the entry is in the list, see `_ask`
            self._publish(*entry)

    def stalled(self) -> None:
        """A collective takes long: find out whether that is because somebody has joined."""
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, args=(self._generation,), name="spark-elastic-join", daemon=True).start()

    def _ask(self, generation: int) -> None:
        try:
            (since,) = self._link.kv_get(self._round, [f"{self._prefix(generation)}/first"], _FOREVER_S)
            if generation != self._generation:
                return
            self._publishing = True
            # What is launched from here on is published by the launching thread; what was before is in the list.
            for number, entry in list(self._last):
                if number >= int(since):
                    self._publish(number, entry)
        except (SparkElasticError, TimeoutError):  # the round is over
            return

    def _publish(self, number: int, entry: dict[str, Any]) -> None:
        dtype, count, device = entry["tensor"]
        plain = {"name": entry["name"], "dtype": str(dtype), "count": count, "device": device}
        plain["argument"] = _plain(entry["argument"])
        self._link.kv_set(self._round, self._key(number), json.dumps(plain).encode())

    def _key(self, number: int) -> str:
        return f"{self._prefix(self._generation)}/collective/{number}"

    def _prefix(self, generation: int) -> str:
        # with the name: who has joined in one group must not be told of the collectives of another
        return f"join/{self._name}/{generation}"

    # --- the rank that joins ------------------------------------------------------------------

    def join(self, group: GlooGroup) -> int:
        """Take part in what the others do until all have joined; the rank that did so last."""
        prefix = self._prefix(self._generation)
        self._publishing = False
        self._link.kv_set(self._round, f"{prefix}/rank/{self._rank}", str(self.count).encode())
        self._link.kv_set(self._round, f"{prefix}/first", str(self.count).encode())
        everyone = [f"{prefix}/rank/{rank}" for rank in range(self._size)]
        threading.Thread(
            target=self._end_when_all_have, args=(everyone,), name="spark-elastic-join", daemon=True
        ).start()
        while True:
            (what,) = self._link.kv_get(self._round, [self._key(self.count)], _FOREVER_S)
            if what == _END:
                break
            _take_part(group, json.loads(what))
        counts = self._link.kv_get(self._round, everyone, _FOREVER_S)
        self._generation += 1
        self._asking = False
        return max(range(self._size), key=lambda rank: (int(counts[rank]), rank))

    def _end_when_all_have(self, everyone: list[str]) -> None:
        try:
            counts = self._link.kv_get(self._round, everyone, _FOREVER_S)
            number = max(int(count) for count in counts)
            self._link.kv_set(self._round, everyone[0].rsplit("/", 2)[0] + f"/collective/{number}", _END)
        except (SparkElasticError, TimeoutError):
            return


def _plain(argument: Any) -> Any:
    return argument if isinstance(argument, int) else str(argument)


def _take_part(group: GlooGroup, what: dict[str, Any]) -> None:
    """Contribute nothing to one collective of the others."""
    dtype = getattr(torch, what["dtype"].removeprefix("torch."))
    if what["name"] == "allreduce":
        operator = group.operator(what["argument"])
        # of an all-reduce, the way that it goes depends on where the tensors lie
        neutral = _neutral(what["argument"], dtype)
        tensor = torch.full((what["count"],), neutral, dtype=dtype, device=what["device"])
        group.wait(group.allreduce(tensor, operator))
    elif what["name"] == "allgather":
        tensor = torch.zeros(what["count"], dtype=dtype)
        group.wait(group.allgather(tensor.new_empty(what["count"] * group.size), tensor))
    elif what["name"] == "broadcast" and what["argument"] != group.rank:
        group.wait(group.broadcast(torch.empty(what["count"], dtype=dtype), what["argument"]))
    else:
        raise UsageError(
            f"another rank has called {what['name']} while this one is in hvd.join(), which it cannot take part in; "
            "allreduce, allgather and broadcasts from ranks that have not joined are possible then"
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
