"""The ways in which a group reduces tensors, and their thresholds; `Group.allreduce` chooses by this table.

    tensor      way                         if
    on the CPU  `shared_memory`             all members are on one host and can open one another's memory, and the
                                            type and operator are in its `reducer`
    on the CPU  Gloo's ring (`gloo`)        always
    on a GPU    NCCL (`gpu`)                each member has a GPU of its own, and a torch and NCCL that can be aborted
    on a GPU    a copy in the host's        always
                memory, as on the CPU

All members choose alike: the conditions are compared when the group connects (shared memory) or at its first tensor on
a GPU (NCCL). `benchmarks/allreduce.py` chose shared memory, which takes a fifth to two thirds of Gloo's time from 4
bytes to 105 MB, and Gloo's ring between hosts, where sums host by host were slower from 1 MB on
(`docs/decisions/12-shared-memory-reduction.md`). With NCCL tensors stay in the GPUs' memory (`docs/gpus.md`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from spark_elastic.errors import InvalidSettingsError

# --- thresholds -------------------------------------------------------------------------------------

# Those of shared memory are measured by `benchmarks/allreduce.py`, in this project so far on 2 cores: run it before
# changing one.

SMALL_CHUNK_BYTES = 16 << 10
"""Shared memory: chunks up to this size use small slots, of which more are in flight."""
LARGE_CHUNK_BYTES = 1 << 20
"""Shared memory: larger tensors are sent in chunks of this size, so that a segment stays small."""
CHUNKS_BEFORE_READING = 8
"""Shared memory: chunks to send before results that are ready are read; few enough to stay in the cache."""
SPIN_S = 100e-6
"""Shared memory: the time to spin for a peer before sleeping, about the cost of a sleep and its wake-up. A longer spin
takes the core from a peer that needs it to compute."""
GPU_SPIN_S = 2e-3
"""NCCL: a wait polls without a pause for this long: the gradients of a step are usually reduced by then."""
BUCKET_BYTES = 25 << 20
"""The size at which a bucket of gradients is full. Buckets are filled in the usual order of backward: last layer first.
DistributedDataParallel's: `benchmarks/step_time.py` finds no difference between 0.25 and 64 MB."""
FIRST_BUCKET_BYTES = 1 << 20
"""The size of the first bucket, whose reduction begins early in backward; DistributedDataParallel's, too."""
STALL_S = 0.25
"""A longer wait is reported to the driver, and makes a rank ask whether another one has joined. It is far above the
length of a reduction, so that this costs nothing while no rank waits."""

# --- the setting --------------------------------------------------------------------------------------

REDUCTION_SETTING = "SPARK_ELASTIC_REDUCTION"
AUTO, GLOO, SHARED = "auto", "gloo", "shared"


def reduction_setting() -> str:
    """Return the environment's way of reduction: "auto", "gloo" or "shared". Raise InvalidSettingsError for others."""
    value = os.environ.get(REDUCTION_SETTING, AUTO)
    if value not in (AUTO, GLOO, SHARED):
        raise InvalidSettingsError(
            f"{REDUCTION_SETTING}={value!r} is not a way of reduction; expected auto, gloo or shared"
        )
    return value


# --- the group and its ways ---------------------------------------------------------------------------

Fill = Callable[[torch.Tensor, int], None]
"""`fill(out, start)` writes the elements of a flat tensor from index `start` on into `out`."""


class GroupContext(Protocol):
    """The group, as its parts use it."""

    round: int
    name: str
    rank: int
    size: int
    world_ranks: Sequence[int]
    why: str | None
    """The reason why the group is over; None while it is in use."""

    def check_alive(self) -> None:
        """Raise HorovodInternalError if the group was closed, or the driver has ended its round."""

    def report_stall(self, begins: bool) -> None:
        """Report that a wait has taken longer than `STALL_S`, or that it has ended."""

    def exchange(self, mine: bytes, *, serve: bool = False) -> list[bytes]:
        """Return the bytes of all members, which must have equal lengths. Ranks that have joined do not take part.

        `serve`: complete comparisons that were begun for other groups meanwhile. Not within such a comparison.
        """

    def allreduce(self, tensor: torch.Tensor, op: Any) -> Any: ...

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any: ...

    def broadcast(self, tensor: torch.Tensor, root: int, by_nccl: bool = False) -> Any: ...

    def wait(self, work: Any) -> None: ...


def is_on_gpu(*tensors: torch.Tensor) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)
