"""How a group adds up tensors that lie on GPUs: all members decide it together, at the first such tensor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_elastic.collective.devices import OLDEST_TORCH_FOR_NCCL, Seat, choose_backend
from spark_elastic.collective.nccl import NcclGroup, NcclWork, Runtime
from spark_elastic.collective.shared_memory.peers import setting as wanted_reduction
from spark_elastic.errors import HorovodInternalError

if TYPE_CHECKING:
    from spark_elastic.collective.gloo import GlooGroup

log = logging.getLogger("spark_elastic.collective")

_SEAT_BYTES = 1024
_KINDS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)
_warned: set[str] = set()
MOST_FAILURES = 3
_failures: list[str] = []
"""How NCCL failed in this process since it last succeeded. A peer that is gone is one failure, and the next world goes
on; where NCCL cannot work at all, each world would end with one."""


def seat_of(device: torch.device) -> Seat:
    """What this process says of its GPU. Sets CUDA up."""
    if not dist.is_nccl_available():
        return Seat("", (0, 0), f"torch {torch.__version__} is built without NCCL")
    if len(_failures) >= MOST_FAILURES:
        return Seat("", (0, 0), f"it failed {len(_failures)} times in a row: {_failures[-1]}")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH_FOR_NCCL:
        return Seat("", (0, 0), f"torch {torch.__version__} cannot abort it safely; 2.7 and newer can")
    properties = torch.cuda.get_device_properties(device)
    named = f"{os.uname().nodename} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
    version = torch.cuda.nccl.version()
    return Seat(str(getattr(properties, "uuid", named)), (int(version[0]), int(version[1])))


class GpuReduction:
    """Of one group in one round. Nothing is decided, and nothing connected, before a tensor on a GPU comes.

    Args:
        connect_store: a store for the communicator's rendezvous, in the driver's key-value store.
        while_waiting: called now and then during a wait.
    """

    def __init__(
        self,
        group: GlooGroup,
        connect_store: Callable[[], Any],
        stalled: Callable[[], None],
        blocked: Callable[[bool], None],
        while_waiting: Callable[[], None],
        stall_s: float,
        *,
        seat: Callable[[torch.device], Seat] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._group = group
        self._connect_store = connect_store
        self._stalled = stalled
        self._blocked = blocked
        self._while_waiting = while_waiting
        self._stall_s = stall_s
        self._seat = seat or seat_of
        self._runtime = runtime
        self._decided = False
        self._over = False
        self._nccl: NcclGroup | None = None
        self.reason = ""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether NCCL adds this one up. A collective of all members, the first time.

        Raises: HorovodInternalError: a peer is gone.
        """
        if not self._decided:
            self._decide(tensor.device)
            self._decided = True
        return self._nccl is not None and tensor.dtype in _KINDS and tensor.is_contiguous()

    def _decide(self, device: torch.device) -> None:
        mine = json.dumps(self._seat(device)._asdict()).encode()[:_SEAT_BYTES].ljust(_SEAT_BYTES)
        seats = [_seat(told) for told in self._group.exchange(mine)]
        backend, self.reason = choose_backend(seats, wanted_reduction())
        if backend == "nccl":
            failure = self._connect(device)
            # Not one may go another way than the others.
            if not all(int.from_bytes(told, "little") for told in self._group.exchange(bytes([failure is None]))):
                self.close()
                self._nccl = None
                self.reason = failure or "another worker could not connect to the others' GPUs"
        log.info("gradients on GPUs go through %s: %s", "NCCL" if self._nccl else "Gloo", self.reason)
        if self._nccl is None and self.reason not in _warned and wanted_reduction() != "gloo":
            _warned.add(self.reason)
            log.warning("gradients on GPUs are added up through the hosts' memory, not by NCCL: %s", self.reason)

    def _connect(self, device: torch.device) -> str | None:
        """Returns: why it did not work."""
        group = self._group
        made = NcclGroup(
            device,
            group.check_alive,
            self._stalled,
            self._blocked,
            self._stall_s,
            while_waiting=self._while_waiting,
            runtime=self._runtime,
        )
        self._nccl = made
        if self._over:  # a cut that comes from here on finds it
            made.cut()
        try:
            made.connect(self._connect_store(), group.rank, group.size)
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            return str(error)
        return None

    def launch(self, tensor: torch.Tensor, op: Any) -> NcclWork:
        assert self._nccl is not None
        return self._noting_failures(lambda nccl: nccl.allreduce(tensor, op))

    def wait(self, work: NcclWork) -> None:
        self._noting_failures(lambda nccl: nccl.wait(work))
        _failures.clear()

    def _noting_failures(self, call: Callable[[NcclGroup], Any]) -> Any:
        assert self._nccl is not None
        try:
            return call(self._nccl)
        except HorovodInternalError as error:
            if str(error).startswith("NCCL failed"):
                _failures.append(str(error)[:300])
            raise

    def cut(self) -> None:
        """The round is over, and the group says so already. From any thread."""
        self._over = True
        if self._nccl is not None:
            self._nccl.cut()

    def close(self) -> None:
        self.cut()

    def close_in_child(self) -> list[Any]:
        """What a forked child must keep: its destructor would wait for threads that a child does not have."""
        return [] if self._nccl is None else [self._nccl.forget()]


def _seat(told: bytes) -> Seat:
    fields = json.loads(told.rstrip())
    return Seat(str(fields["uuid"]), (int(fields["nccl"][0]), int(fields["nccl"][1])), str(fields["why"]))
