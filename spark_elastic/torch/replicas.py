"""Check that the workers' models are equal, before they train apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.reduction import Max
from spark_elastic.elastic.digest import digest
from spark_elastic.errors import MismatchError

_BROADCAST = (
    "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, as DistributedDataParallel "
    "does by itself, or give the model to the state of an elastic loop"
)


def check_equal(group: GlooGroup, tensors: Mapping[str, torch.Tensor], remedy: str = _BROADCAST) -> None:
    """Compare digests of tensors with those of the other members; ranks that have joined do not count.

    Args:
        group: the members; all of them call this.
        tensors: the tensors by name, in the same order on all members.
        remedy: what to do if some differ, a sentence for the error.

    Raises:
        MismatchError: it names the first tensor that differs, on all members.
        HorovodInternalError: a peer is gone.
    """
    digests = torch.tensor(
        [int.from_bytes(digest(tensor.detach())[:7], "little") for tensor in tensors.values()],
        dtype=torch.int64,
        device="cpu",
    )
    extremes = torch.cat([digests, -digests])
    group.wait(group.allreduce(extremes, Max.gloo))
    highest, lowest = extremes.split(len(digests))
    differ = [name for name, same in zip(tensors, (highest == -lowest).tolist(), strict=True) if not same]
    if differ:
        raise MismatchError(
            f"{differ[0]} has other values on some workers than on others ({len(differ)} of {len(tensors)} parameters "
            f"differ), so each would train a model of its own. {remedy}"
        )
