"""All-reduces of single tensors, of several tensors at once, and of sparse tensors; see also `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_elastic.collective.calls import Handle, describe_reduction, queue_call, refuse_call, start_allgather
from spark_elastic.collective.group import Group
from spark_elastic.collective.negotiation import Launched, Launching
from spark_elastic.collective.operators import Average, ReduceOp, Sum, resolve_op, scale_, wire_type
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce `tensor` in place over all members; the handle's result is `tensor`.

    Returns:
        A handle for `synchronize` and `poll`. Do not use the tensor before `synchronize` has returned.
    """
    how = resolve_op(op, average)
    return _reduce("allreduce", [tensor], how, name, prescale_factor, postscale_factor, process_set)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce `tensor` over all members into a new tensor, the handle's result; see `allreduce_async_`."""
    copy = tensor.detach().clone()
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place over all members and return it."""
    allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return tensor


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors in place, those of one type together; the handle's result is their list."""
    how = resolve_op(op, average)
    return _reduce("grouped_allreduce", tensors, how, name, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Reduce several tensors over all members into new ones; see `grouped_allreduce_async_`."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place and return them."""
    grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return list(tensors)


def _reduce(
    kind: str,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle:
    """Queue the reduction of these tensors in place, those of one type together."""
    grouped = kind != "allreduce"
    result = list(tensors) if grouped else tensors[0]
    group = process_set.group()
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    try:
        operator = op.gloo
        types = {dtype: wire_type(dtype) for dtype in by_type}
    except UsageError as error:
        raise refuse_call(group, kind, name, error) from None
    if group is None:
        for tensor in tensors:
            scale_(scale_(tensor.detach(), prescale), postscale)
        return Handle(None, [], lambda: result)

    def launch(group: Group) -> Launched:
        factor = postscale / (group.size if op is Average else 1)
        works = []
        sent: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for dtype, alike in by_type.items():
            # a group is reduced in a copy: if the collective fails, its tensors still have their values
            flat = torch.cat([tensor.reshape(-1) for tensor in alike]) if grouped else alike[0]
            flat = flat.to(types[dtype]).contiguous()
            scale_(flat, prescale)
            if flat.numel():
                works.append(group.allreduce(flat, operator))
            sent.append((flat, alike))

        def finish() -> Any:
            for flat, alike in sent:
                scale_(flat, factor)
                if flat.data_ptr() == alike[0].data_ptr():
                    continue
                parts = flat.view(-1).split([tensor.numel() for tensor in alike])
                for tensor, part in zip(alike, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))
            return result

        return works, finish

    return queue_call(group, kind, name, describe_reduction(tensors, op, prescale, postscale), launch)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Handle:
    """Sum or average the members' sparse tensors by concatenating their entries; equal indices add up.

    Returns:
        A handle for `synchronize` and `poll`. As with Horovod, it can also be called for the result.

    Raises:
        UsageError: another operator, or a tensor that is not sparse.
    """
    group = process_set.group()
    problem = ""
    if op not in (Average, Sum):
        problem = f"sparse tensors are reduced with op=hvd.Average or op=hvd.Sum, not {op}"
    elif not tensor.is_sparse:
        problem = "sparse_allreduce_async takes a sparse COO tensor; for others there is allreduce_async"
    if problem:
        raise refuse_call(group, "sparse_allreduce", name, UsageError(problem))
    if group is None:
        return Handle(None, [], tensor.clone)

    def launch(group: Group) -> Launching:
        sparse = tensor.detach().coalesce()
        launched = []
        for part in (sparse.indices().t().contiguous(), sparse.values()):
            launched.append((yield from start_allgather(group, part)))
        divisor = group.size if op is Average else 1

        def finish() -> torch.Tensor:
            indices, values = (complete() for _, complete in launched)
            return torch.sparse_coo_tensor(indices.t(), values / divisor if divisor > 1 else values, tensor.shape)

        return [work for works, _ in launched for work in works], finish

    return queue_call(group, "sparse_allreduce", name, describe_reduction([tensor], op), launch)
