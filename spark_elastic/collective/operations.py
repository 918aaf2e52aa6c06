"""Collectives on tensors, with the names and arguments that Horovod users know; all-reduces are in `allreduce`.

Before any data is sent, the members of a group compare what they call, see `calls` and `negotiation`. Calls are matched
by their `name`, or, without a name, by their order among the calls of the same collective. In a world of one,
collectives return their input. So they do before the elastic loop in a newcomer, and in a process that runs its
function again: the loop brings the state.

To add a collective, write it here and add its name to `__all__`: `spark_elastic.torch` exports all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_elastic.collective.allreduce import (
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from spark_elastic.collective.calls import (
    Handle,
    agree,
    describe_reduction,
    describe_tensor,
    queue_call,
    refuse_call,
    start_allgather,
)
from spark_elastic.collective.group import Group, as_bytes
from spark_elastic.collective.negotiation import Launched, Launching, until_done
from spark_elastic.collective.operators import Average, ReduceOp, Sum, scale_
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import OutsideLoopError, UsageError

__all__ = [
    "allgather_async",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def is_provisional() -> bool:
    """Return True while this process is in no world, see `Process.provisional`; raise an error before `init`."""
    process.require()
    return process.provisional


def _all_of(launched: Sequence[Launched]) -> Launched:
    return [work for works, _ in launched for work in works], lambda: [finish() for _, finish in launched]


# --- allgather, broadcast -------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Concatenate the members' tensors along the first dimension, in rank order.

    The size of the first dimension may differ between members, the others may not. A scalar counts as one row.
    """
    group = process_set.group()
    plain = torch.atleast_1d(tensor.detach()).contiguous()
    if group is None:
        return Handle(None, [], plain.clone)
    description = describe_tensor(plain, rows=False)
    return queue_call(group, "allgather", name, description, lambda group: start_allgather(group, plain))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Gather several tensors, each as `allgather_async` does; the handle's result is a list."""
    group = process_set.group()
    plain = [torch.atleast_1d(tensor.detach()).contiguous() for tensor in tensors]
    if group is None:
        return Handle(None, [], lambda: [tensor.clone() for tensor in plain])

    def launch(group: Group) -> Launching:
        launched = []
        for tensor in plain:
            launched.append((yield from start_allgather(group, tensor)))
        return _all_of(launched)

    description = "; ".join(describe_tensor(tensor, rows=False) for tensor in plain)
    return queue_call(group, "grouped_allgather", name, description, launch)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Overwrite `tensor` with the tensor of `root_rank`; type and shape must be the same on all members."""
    if is_provisional():
        return Handle(None, [], lambda: tensor)
    group = process_set.group()
    plain = tensor.detach()
    try:
        root = process_set.set_rank_of(root_rank)
    except UsageError as error:
        raise refuse_call(group, "broadcast", name, error) from None
    if group is None:
        return Handle(None, [], lambda: tensor)

    def launch(group: Group) -> Launched:
        wire = plain.contiguous()
        works = [group.broadcast(as_bytes(wire), root)] if wire.numel() else []

        def finish() -> torch.Tensor:
            if wire.data_ptr() != plain.data_ptr():
                plain.copy_(wire)
            return tensor

        return works, finish

    return queue_call(group, "broadcast", name, f"{describe_tensor(plain)}, root_rank={root_rank}", launch)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with the tensor of `root_rank` and return it."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Broadcast the tensor of `root_rank` into a new tensor, the handle's result; see `broadcast_async_`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


# --- alltoall, reducescatter, barrier -------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send `splits[r]` rows of `tensor` to each rank r, in order, and concatenate the received rows in rank order.

    Without `splits`, the rows are divided equally.

    Returns:
        A handle whose result is the tensor, or (tensor, received splits) if `splits` was given.

    Raises:
        UsageError: the splits do not add up to the rows.
        OutsideLoopError: a newcomer before the elastic loop has given splits for several ranks.
    """
    group = process_set.group()
    if is_provisional() and splits is not None and len(splits) != 1:
        raise OutsideLoopError(
            f"alltoall was given rows for {len(splits)} ranks before the elastic loop, where this worker, which joins "
            "a job that is already running, reaches none of them; move the call into the function decorated with "
            "hvd.elastic.run"
        )
    plain = tensor.detach().contiguous()
    size = process_set.size()
    try:
        sent = _rows_to_send(plain, splits, size)
    except UsageError as error:
        raise refuse_call(group, "alltoall", name, error) from None
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def result(out: torch.Tensor, received: list[int]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return out if splits is None else (out, torch.tensor(received, dtype=dtype, device="cpu"))

    if group is None:
        return Handle(None, [], lambda: result(plain.clone(), sent))

    def launch(group: Group) -> Launching:
        incoming = torch.empty(size, dtype=torch.int64, device="cpu")
        ones = [1] * size
        yield from until_done(group, group.alltoall(incoming, torch.tensor(sent, device="cpu"), ones, ones))
        received = [int(count) for count in incoming]
        out = plain.new_empty((sum(received), *plain.shape[1:]))
        width = plain.shape[1:].numel() * plain.element_size()
        bytes_in, bytes_out = [n * width for n in received], [n * width for n in sent]
        return [group.alltoall(as_bytes(out), as_bytes(plain), bytes_in, bytes_out)], lambda: result(out, received)

    return queue_call(group, "alltoall", name, describe_tensor(plain, rows=False), launch)


def _rows_to_send(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise UsageError("alltoall needs a tensor with rows, not a scalar")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(f"{rows} rows cannot be divided equally among {size} ranks; give splits=")
        return [rows // size] * size
    if isinstance(splits, torch.Tensor) and (splits.dtype.is_floating_point or splits.dim() != 1):
        raise UsageError(f"splits must be a vector of integers, not {describe_tensor(splits)}")
    sent = [int(count) for count in splits]
    if len(sent) != size or sum(sent) != rows or min(sent, default=0) < 0:
        raise UsageError(f"splits {sent} must be {size} counts, none negative, that add up to the {rows} rows")
    return sent


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce `tensor`, and keep this rank's part of the rows.

    If the rows cannot be divided equally, the first ranks keep one row more.

    Raises:
        UsageError: another operator than Average or Sum, or a scalar.
    """
    return _reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, lambda parts: parts[0])


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce several tensors, each as `reducescatter_async` does; the handle's result is a list."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, list)


def _reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    result: Callable[[list[torch.Tensor]], Any],
) -> Handle:
    group = process_set.group()
    plain = [tensor.detach().contiguous() for tensor in tensors]
    try:
        _ = op.gloo  # refuses Adasum
        if op not in (Average, Sum):
            raise UsageError(f"reducescatter supports op=hvd.Average and op=hvd.Sum, not {op}")
        if any(tensor.dim() == 0 for tensor in plain):
            raise UsageError("reducescatter needs a tensor with rows, not a scalar")
    except UsageError as error:
        raise refuse_call(group, "reducescatter", name, error) from None
    if group is None:
        return Handle(None, [], lambda: result([scale_(scale_(part.clone(), prescale), postscale) for part in plain]))

    def launch(group: Group) -> Launched:
        factor = postscale / (group.size if op is Average else 1)
        works, finish = _all_of([_start_reducescatter(group, tensor, prescale, factor) for tensor in plain])
        return works, lambda: result(finish())

    description = describe_reduction(plain, op, prescale, postscale)
    return queue_call(group, "reducescatter", name, description, launch)


def _start_reducescatter(group: Group, plain: torch.Tensor, before: float, after: float) -> Launched:
    """Launch an all-to-all, and sum locally: each row is sent once, and any type and number of rows is possible."""
    rows, size, rank = plain.shape[0], group.size, group.rank
    counts = [rows // size + (r < rows % size) for r in range(size)]
    sent = scale_(plain.clone() if before != 1.0 else plain, before)
    parts = plain.new_empty((size, counts[rank], *plain.shape[1:]))
    width = plain.shape[1:].numel() * plain.element_size()
    works = []
    if plain.numel():
        works = [
            group.alltoall(as_bytes(parts), as_bytes(sent), [counts[rank] * width] * size, [n * width for n in counts])
        ]

    def finish() -> torch.Tensor:
        # summed in 32 bits: a sum that overflows 16 bits may fit into them once it is divided
        wide = torch.float32 if plain.dtype in (torch.float16, torch.bfloat16) else plain.dtype
        return scale_(parts.sum(dim=0, dtype=wide), after).to(plain.dtype)

    return works, finish


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and take part in the others' collectives until all have joined.

    A rank that has joined adds nothing to an allreduce (averages are still over all ranks) and no rows to an allgather.
    Its model is not updated: broadcast the model of the rank that joined last.

    Args:
        device: accepted for compatibility with Horovod; ignored.

    Returns:
        The rank that joined last, the same on every rank.

    Raises:
        UsageError: another rank has called a collective in which this rank cannot take part, such as an all-to-all.
    """
    group = process.group()
    if group is None:
        return 0
    group.negotiation.settle()
    last = group.log.join()
    group.negotiation.reset_numbers()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member has called it."""
    if is_provisional():
        return
    agree(process_set.group(), "barrier")
