"""Choose the device that a worker computes on, and the way in which a world reduces tensors on GPUs.

Pure decisions: `choose_device` and `choose_backend` get facts and return a choice with its reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spark_elastic.collective.reduce import GLOO, REDUCTION_SETTING
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.settings import DEVICE_SETTING

OLDEST_NCCL = (2, 26)
OLDEST_TORCH_FOR_NCCL = (2, 7)
"""Older versions can hang when a communicator is aborted after a peer was lost, and the job could not continue."""

_REMEDY = (
    "have Spark hand them out (spark.executor.resource.gpu.amount, spark.task.resource.gpu.amount, docs/gpus.md) and "
    "install a CUDA build of torch on the executors, or train with device='auto' or 'cpu'"
)


class DeviceInfo(NamedTuple):
    """The devices that torch sees in this process."""

    torch: str
    """The version of torch."""
    cuda: str | None
    """The version of CUDA or ROCm that torch is built for; None: built without."""
    gpus: int
    """The number of GPUs."""


class Choice(NamedTuple):
    """A device, as `torch.device` takes it, or the name of a backend; and the reason for it in words."""

    device: str
    reason: str


class MemberDevice(NamedTuple):
    """A member's description of its GPU for the others."""

    uuid: str
    nccl: tuple[int, int]
    """The version of NCCL; (0, 0) if it cannot be used, for the reason in `why`."""
    why: str = ""


def device_info() -> DeviceInfo:
    """Return the devices that torch sees. Fast: it asks the GPU driver and does not initialise CUDA."""
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    return DeviceInfo(torch.__version__, built, torch.cuda.device_count() if built else 0)


def device_setting() -> str:
    """Return the device that the environment asks for, "auto" by default."""
    return os.environ.get(DEVICE_SETTING, "auto")


def choose_device(asked: str | None, seen: DeviceInfo, lease: Callable[[int], tuple[int, str]]) -> Choice:
    """Choose the device that a worker computes on.

    Args:
        asked: "auto" or None, "cpu", "cuda", "cuda:N", or another name that torch knows.
        seen: the devices in this process.
        lease: chooses among several GPUs, which a worker sees if Spark assigns none; see `leases.lease_gpu`.

    Raises:
        InvalidSettingsError: there is no such device here; the message has the remedy.
    """
    if asked in (None, "auto"):
        if not seen.gpus:
            return Choice("cpu", f"torch {seen.torch} sees no GPU" if seen.cuda else f"torch {seen.torch} has no CUDA")
        return _one_of(seen, lease)
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
        return _one_of(seen, lease)
    if int(found.group(1)) >= seen.gpus:
        raise InvalidSettingsError(f"device={asked!r}, but torch sees {seen.gpus} GPUs in this worker; {_REMEDY}")
    return Choice(asked, "it was asked for")


def _one_of(seen: DeviceInfo, lease: Callable[[int], tuple[int, str]]) -> Choice:
    if seen.gpus == 1:
        return Choice("cuda:0", "the only GPU that this worker sees")
    number, reason = lease(seen.gpus)
    return Choice(f"cuda:{number}", reason)


def choose_backend(members: Sequence[MemberDevice], wanted: str) -> Choice:
    """Choose how tensors on GPUs are reduced: "nccl", or "gloo", which goes through the hosts' memory.

    All members make the same choice, from the same facts: their devices by rank, and `reduce.reduction_setting`.
    """
    if wanted == GLOO:
        return Choice("gloo", f"{REDUCTION_SETTING}=gloo")
    for rank, member in enumerate(members):
        if member.why:
            return Choice("gloo", f"rank {rank} cannot use NCCL: {member.why}")
    versions = {member.nccl for member in members}
    if len(versions) > 1:
        return Choice("gloo", f"workers have different versions of NCCL: {sorted(versions)}")
    if versions and min(versions) < OLDEST_NCCL:
        return Choice("gloo", f"NCCL {_dotted(min(versions))} cannot be aborted safely; {_dotted(OLDEST_NCCL)} can")
    first: dict[str, int] = {}
    for rank, member in enumerate(members):
        if member.uuid in first:
            return Choice(
                "gloo",
                f"ranks {first[member.uuid]} and {rank} share one GPU; give each task its own "
                "(spark.task.resource.gpu.amount=1, and no more workers on a host than it has GPUs)",
            )
        first[member.uuid] = rank
    return Choice("nccl", "each worker has a GPU of its own")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
