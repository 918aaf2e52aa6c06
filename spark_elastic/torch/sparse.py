"""The reduction of sparse gradients: their entries are gathered from all members."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spark_elastic.collective.calls import Handle, start_allgather
from spark_elastic.collective.group import Group
from spark_elastic.collective.negotiation import launch_now


def gather_entries(group: Group, param: torch.nn.Parameter, divisor: int) -> Callable[[], None]:
    """Start to gather the entries of a sparse gradient; return the function that completes it.

    Entries of several members with the same index are summed. A member without a gradient sends no entries; a gradient
    without entries, which is a gradient nevertheless, is sent as one with the index -1. If no member has a gradient,
    `param.grad` is None afterwards.

    Args:
        group: the members.
        param: the parameter, whose `grad` is sparse, dense or None.
        divisor: the number to divide the values by before they are sent.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    grad = param.grad if param.grad is not None else _no_entries(param)
    if not grad.is_sparse:
        grad = grad.to_sparse(1)
    grad = grad.coalesce()
    places, sent = grad.indices().t().contiguous(), grad.values() / divisor
    if param.grad is not None and not len(places):
        places, sent = places.new_full((1, grad.sparse_dim()), -1), sent.new_zeros((1, *sent.shape[1:]))
    indices, values = (Handle(group, *launch_now(start_allgather(group, part))) for part in (places, sent))

    def complete() -> None:
        at, received = indices.wait(), values.wait()
        if not len(at):
            param.grad = None
            return
        if (at < 0).any():
            at, received = at[at[:, 0] >= 0], received[at[:, 0] >= 0]
        param.grad = torch.sparse_coo_tensor(at.t(), received, param.shape).coalesce()

    return complete


def _no_entries(param: torch.Tensor) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    return torch.sparse_coo_tensor(indices, param.new_empty((0, *param.shape[1:])), param.shape)
