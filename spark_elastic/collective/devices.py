"""Which device a worker computes on, and how the workers of a world reduce what lies there. Facts in, choices out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.settings import DEVICE_SETTING

OLDEST_NCCL = (2, 26)
OLDEST_TORCH_FOR_NCCL = (2, 7)
"""Before these, aborting a communicator whose peer is gone can hang: then a lost worker would not be survived."""

_REMEDY = (
    "have Spark hand them out (spark.executor.resource.gpu.amount, spark.task.resource.gpu.amount, docs/gpus.md) and "
    "install a CUDA build of torch on the executors, or train with device='auto' or 'cpu'"
)


class Sight(NamedTuple):
    """What torch sees in this process. cuda: the version that it was built with; None: without. gpus: how many."""

    torch: str
    cuda: str | None
    gpus: int


class Choice(NamedTuple):
    """device: as `torch.device` takes it. reason: in words."""

    device: str
    reason: str


class Seat(NamedTuple):
    """What a member says of its device.

    uuid: of the GPU. nccl: version; (0, 0): none can be used, for the reason `why`.
    """

    uuid: str
    nccl: tuple[int, int]
    why: str = ""


def sight() -> Sight:
    """Cheap: it asks the driver without setting CUDA up in this process."""
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    return Sight(torch.__version__, built, torch.cuda.device_count() if built else 0)


def choose_device(asked: str | None, seen: Sight, local_rank: int) -> Choice:
    """What a worker computes on.

    Args:
        asked: "auto" or None, "cpu", "cuda", "cuda:N", or another name that torch knows.
        local_rank: decides where a worker sees more GPUs than its own, because Spark hands none out.

    Raises: InvalidSettingsError: there is no such device here; says what to do.
    """
    if asked in (None, "auto"):
        if not seen.gpus:
            return Choice("cpu", f"torch {seen.torch} sees no GPU" if seen.cuda else f"torch {seen.torch} has no CUDA")
        return _of_rank(seen, local_rank)
    assert asked is not None
    found = re.fullmatch(r"cuda(?::(\d+))?", asked)
    if found is None:
        try:
            return Choice(str(torch.device(asked)), "it was asked for")
        except RuntimeError as error:
            raise InvalidSettingsError(f"device={asked!r}: {error}") from None
    if not seen.gpus:
        why = "is built without CUDA" if not seen.cuda else f"is built for CUDA {seen.cuda}"
        raise InvalidSettingsError(
            f"device={asked!r}, but torch sees no GPU in this worker (torch {seen.torch} {why}; "
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); {_REMEDY}"
        )
    if found.group(1) is None:
        return _of_rank(seen, local_rank)
    if int(found.group(1)) >= seen.gpus:
        raise InvalidSettingsError(f"device={asked!r}, but torch sees {seen.gpus} GPUs in this worker; {_REMEDY}")
    return Choice(asked, "it was asked for")


def _of_rank(seen: Sight, local_rank: int) -> Choice:
    if seen.gpus == 1:
        return Choice("cuda:0", "the only GPU that this worker sees")
    return Choice(f"cuda:{local_rank % seen.gpus}", f"by local rank, of {seen.gpus} GPUs that this worker sees")


def choose_backend(seats: Sequence[Seat], wanted: str) -> Choice:
    """How tensors on GPUs are added up; every member comes to the same, from the same seats.

    Args:
        seats: of the members, in the order of their ranks.
        wanted: SPARK_ELASTIC_REDUCTION.

    Returns: "nccl" or "gloo", which goes through the hosts' memory.
    """
    if wanted == "gloo":
        return Choice("gloo", "SPARK_ELASTIC_REDUCTION=gloo")
    for rank, seat in enumerate(seats):
        if seat.why:
            return Choice("gloo", f"rank {rank} cannot use NCCL: {seat.why}")
    versions = {seat.nccl for seat in seats}
    if len(versions) > 1:
        return Choice("gloo", f"workers have different versions of NCCL: {sorted(versions)}")
    if versions and min(versions) < OLDEST_NCCL:
        return Choice("gloo", f"NCCL {_dotted(min(versions))} cannot be aborted safely; {_dotted(OLDEST_NCCL)} can")
    first: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        if seat.uuid in first:
            return Choice(
                "gloo",
                f"ranks {first[seat.uuid]} and {rank} share one GPU; give each task its own "
                "(spark.task.resource.gpu.amount=1, and no more workers on a host than it has GPUs)",
            )
        first[seat.uuid] = rank
    return Choice("nccl", "each worker has a GPU of its own")


def may_use_gpu(setting: str, seen: Sight) -> bool:
    """Whether tensors of this process may lie on a GPU."""
    return setting != "cpu" and seen.gpus > 0


def setting() -> str:
    return os.environ.get(DEVICE_SETTING, "auto")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
