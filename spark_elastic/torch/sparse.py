"""The reduction of sparse gradients: their entries are gathered from all members."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spark_elastic.collective.calls import Handle, start_allgather
from spark_elastic.collective.group import Group
from spark_elastic.collective.negotiation import launch_now


def gather_entries(group: Group, param: torch.nn.Parameter, divisor: int) -> Callable[[], None]:
    """Start to gather the entries of a gradient, divided by `divisor`; return the function that completes it.

    Entries of several members with the same index are summed. A member without a gradient sends no entries; a gradient
    without entries, which is a gradient nevertheless, is sent as one with the index -1. If no member has a gradient,
    `param.grad` is None afterwards.
    """
    grad = param.grad
    if grad is None:
        no_entries = torch.empty((1, 0), dtype=torch.int64, device=param.device)
        grad = torch.sparse_coo_tensor(no_entries, param.new_empty((0, *param.shape[1:])), param.shape)
    if not grad.is_sparse:
        grad = grad.to_sparse(1)
    grad = grad.coalesce()
    own_indices, sent = grad.indices().t().contiguous(), grad.values() / divisor
    if param.grad is not None and not len(own_indices):
        own_indices, sent = own_indices.new_full((1, grad.sparse_dim()), -1), sent.new_zeros((1, *sent.shape[1:]))
    indices, values = (Handle(group, *launch_now(start_allgather(group, part))) for part in (own_indices, sent))

    def complete() -> None:
        positions, received = indices.wait(), values.wait()
        if not len(positions):
            param.grad = None
            return
        if (positions < 0).any():
            positions, received = positions[positions[:, 0] >= 0], received[positions[:, 0] >= 0]
        param.grad = torch.sparse_coo_tensor(positions.t(), received, param.shape).coalesce()

    return complete
