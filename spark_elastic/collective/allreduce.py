"""All-reduces of single tensors, of several tensors at once, and of sparse tensors; see also `operations`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_elastic.collective.calls import (
    Handle,
    SparseHandle,
    describe_reduction,
    queue_call,
    refuse_call,
    start_allgather,
)
from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.negotiation import Launched
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp, Sum, resolve_op, scale_, wire_type
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
    group = process_set.group()
    plain = tensor.detach()
    try:
        operator = how.gloo
        dtype = wire_type(plain.dtype)
    except UsageError as error:
        raise refuse_call(group, "allreduce", name, error) from None
    if group is None:
        scale_(plain, prescale_factor)
        scale_(plain, postscale_factor)
        return Handle(None, [], lambda: tensor)

    def launch(group: GlooGroup) -> Launched:
        wire = plain.to(dtype).contiguous()
        scale_(wire, prescale_factor)
        work = group.allreduce(wire, operator) if wire.numel() else None
        divisor = group.size if how is Average else 1

        def finish() -> torch.Tensor:
            scale_(wire, postscale_factor / divisor)
            if wire.data_ptr() != plain.data_ptr():
                plain.copy_(wire)
            return tensor

        return [] if work is None else [work], finish

    description = describe_reduction([plain], how, prescale_factor, postscale_factor)
    return queue_call(group, "allreduce", name, description, launch)


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
    group = process_set.group()
    outputs = list(tensors)
    try:
        operator = how.gloo
        for tensor in outputs:
            wire_type(tensor.dtype)
    except UsageError as error:
        raise refuse_call(group, "grouped_allreduce", name, error) from None
    if group is None:
        for tensor in outputs:
            scale_(tensor.detach(), prescale_factor)
            scale_(tensor.detach(), postscale_factor)
        return Handle(None, [], lambda: outputs)

    def launch(group: GlooGroup) -> Launched:
        factor = postscale_factor / (group.size if how is Average else 1)
        works = []
        packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for alike in _by_type(outputs):
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            flat = flat.to(wire_type(flat.dtype))
            scale_(flat, prescale_factor)
            if flat.numel():
                works.append(group.allreduce(flat, operator))
            packed.append((flat, alike))

        def finish() -> list[torch.Tensor]:
            for flat, alike in packed:
                scale_(flat, factor)
                parts = flat.split([tensor.numel() for tensor in alike])
                for tensor, part in zip(alike, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))
            return outputs

        return works, finish

    description = describe_reduction(outputs, how, prescale_factor, postscale_factor)
    return queue_call(group, "grouped_allreduce", name, description, launch)


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
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    handle.wait()
    return list(tensors)


def _by_type(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor.detach())
    return list(kinds.values())


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
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
        return SparseHandle(None, [], tensor.clone)

    def launch(group: GlooGroup) -> Launched:
        sparse = tensor.detach().coalesce()
        launched = [start_allgather(group, part) for part in (sparse.indices().t().contiguous(), sparse.values())]
        divisor = group.size if op is Average else 1

        def finish() -> torch.Tensor:
            indices, values = (complete() for _, complete in launched)
            return torch.sparse_coo_tensor(indices.t(), values / divisor if divisor > 1 else values, tensor.shape)

        return [work for works, _ in launched for work in works], finish

    description = describe_reduction([tensor], op)
    handle = queue_call(group, "sparse_allreduce", name, description, launch, SparseHandle)
    assert isinstance(handle, SparseHandle)
    return handle
