"""Collectives on tensors, with the names and arguments that Horovod users know.

`name` is accepted everywhere and has no effect: collectives match by their order, which must be the same on every
member. In a world of one they return their input. A newcomer may call broadcasts and `barrier` before the elastic
loop, where they do nothing: the loop brings it the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.handles import Handle
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp, Sum, chosen, scale_, wire_type
from spark_elastic.errors import UsageError

# --- allreduce ----------------------------------------------------------------------------------


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

    Returns: a handle for `synchronize` and `poll`. The tensor must not be touched before.
    """
    how = chosen(op, average)
    operator = how.gloo
    group = process_set.group()
    if group is None:
        scale_(tensor.detach(), prescale_factor)
        scale_(tensor.detach(), postscale_factor)
        return Handle(None, [], lambda: tensor)
    plain = tensor.detach()
    wire = plain.to(wire_type(plain.dtype)).contiguous()
    scale_(wire, prescale_factor)
    work = group.allreduce(wire, operator)
    divisor = group.size if how is Average else 1

    def finish() -> torch.Tensor:
        scale_(wire, postscale_factor / divisor)
        if wire.data_ptr() != plain.data_ptr():
            plain.copy_(wire)
        return tensor

    return Handle(group, [work], finish)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `allreduce_async_`, into a new tensor."""
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
    """Reduce several tensors in place, those of one type in one collective; the handle's result is their list."""
    how = chosen(op, average)
    operator = how.gloo
    group = process_set.group()
    outputs = list(tensors)
    if group is None:
        for tensor in outputs:
            scale_(tensor.detach(), prescale_factor)
            scale_(tensor.detach(), postscale_factor)
        return Handle(None, [], lambda: outputs)
    factor = postscale_factor / (group.size if how is Average else 1)
    works = []
    packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for members in _by_type(outputs):
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        flat = flat.to(wire_type(flat.dtype))
        scale_(flat, prescale_factor)
        works.append(group.allreduce(flat, operator))
        packed.append((flat, members))

    def finish() -> list[torch.Tensor]:
        for flat, members in packed:
            scale_(flat, factor)
            pieces = flat.split([tensor.numel() for tensor in members])
            for tensor, piece in zip(members, pieces, strict=True):
                tensor.copy_(piece.view_as(tensor))
        return outputs

    return Handle(group, works, finish)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `grouped_allreduce_async_`, into new tensors."""
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


# --- allgather, broadcast -------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Concatenate the members' tensors along the first dimension, in rank order.

    The first dimension may differ between members, the others may not. A scalar counts as a tensor of one row.
    """
    group = process_set.group()
    plain = tensor.detach()
    plain = (plain.reshape(1) if plain.dim() == 0 else plain).contiguous()
    if group is None:
        return Handle(None, [], plain.clone)
    rows = _row_counts(group, plain)
    most = max(rows)
    if most * plain.shape[1:].numel() == 0:
        return Handle(None, [], lambda: plain.new_empty((sum(rows), *plain.shape[1:])))
    sent = plain if plain.shape[0] == most else _padded(plain, most)
    out = plain.new_empty((group.size, most, *plain.shape[1:]))
    work = group.allgather(_raw(out), _raw(sent))

    def finish() -> torch.Tensor:
        if min(rows) == most:
            return out.flatten(0, 1)
        return torch.cat([out[rank, :count] for rank, count in enumerate(rows)])

    return Handle(group, [work], finish)


def _row_counts(group: GlooGroup, tensor: torch.Tensor) -> list[int]:
    """First dimension on each member. Raises: UsageError: on every member, if the rest of the shapes differ."""
    mine = torch.tensor([tensor.shape[0], tensor.dim(), tensor.shape[1:].numel(), tensor.element_size()])
    everyone = torch.empty((group.size, mine.numel()), dtype=mine.dtype)
    group.wait(group.allgather(everyone.view(-1), mine))
    present = everyone[everyone[:, 1] > 0]  # a rank that has joined sends zeros
    if (present[:, 1:] != present[0, 1:]).any():
        raise UsageError(
            "only the first dimension may differ between ranks; (rows, dimensions, elements a row, bytes an element) "
            f"by rank: {everyone.tolist()}"
        )
    return [int(count) for count in everyone[:, 0]]


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    out = tensor.new_zeros((rows, *tensor.shape[1:]))
    out[: tensor.shape[0]] = tensor
    return out


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: Gloo moves fewer types than torch has, but bytes it always moves."""
    return tensor.view(-1).view(torch.uint8)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Overwrite `tensor` with that of `root_rank`; type and shape must be the same everywhere."""
    if outside_world():
        return Handle(None, [], lambda: tensor)
    group = process_set.group()
    _check_root(root_rank, process_set)
    plain = tensor.detach()
    if group is None or plain.numel() == 0:
        return Handle(None, [], lambda: tensor)
    wire = plain.contiguous()
    work = group.broadcast(_raw(wire), root_rank)

    def finish() -> torch.Tensor:
        if wire.data_ptr() != plain.data_ptr():
            plain.copy_(wire)
        return tensor

    return Handle(group, [work], finish)


def outside_world() -> bool:
    """Whether this process is a newcomer with a provisional position only. Raises: NotInitializedError."""
    process.require()
    return process.provisional


def _check_root(root_rank: int, process_set: ProcessSet) -> None:
    if not 0 <= root_rank < process_set.size():
        raise UsageError(f"root_rank={root_rank} is not a rank of {process_set!r}, which has {process_set.size()}")


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite `tensor` with that of `root_rank` and return it."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `broadcast_async_`, into a new tensor."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


# --- alltoall, reducescatter, barrier -------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Send `splits[r]` rows of `tensor` to each rank r, in order, and concatenate what arrives, in rank order.

    Returns: a handle whose result is the tensor, or (tensor, received splits) if `splits` was given. Without `splits`
        the rows are divided equally.

    Raises:
        UsageError: the splits do not add up to the rows.
    """
    group = process_set.group()
    plain = tensor.detach().contiguous()
    rows, size = plain.shape[0] if plain.dim() else 0, process_set.size()
    if splits is None:
        if rows % size:
            raise UsageError(f"{rows} rows cannot be divided equally among {size} ranks; give splits=")
        sent = [rows // size] * size
    else:
        sent = [int(count) for count in splits]
        if len(sent) != size or sum(sent) != rows or min(sent) < 0:
            raise UsageError(f"splits {sent} must be {size} counts, none negative, that add up to the {rows} rows")
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32
    if group is None:
        received, out, works = sent, plain.clone(), []
    else:
        incoming = torch.empty(size, dtype=torch.int64)
        ones = [1] * size
        group.wait(group.alltoall(incoming, torch.tensor(sent), ones, ones))
        received = [int(count) for count in incoming]
        out = plain.new_empty((sum(received), *plain.shape[1:]))
        width = plain.shape[1:].numel() * plain.element_size()
        works = [group.alltoall(_raw(out), _raw(plain), [n * width for n in received], [n * width for n in sent])]

    def finish() -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return out if splits is None else (out, torch.tensor(received, dtype=dtype))

    return Handle(group, works, finish)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Reduce, then keep this rank's part of the rows; the first ranks have one row more if they do not divide.

    Raises:
        UsageError: for another operator than Average or Sum.
    """
    if op not in (Average, Sum):
        raise UsageError(f"reducescatter knows op=hvd.Average and op=hvd.Sum, not {op}")
    group = process_set.group()
    plain = tensor.detach().contiguous()
    rows, size, rank = plain.shape[0], process_set.size(), process_set.rank()
    counts = [rows // size + (r < rows % size) for r in range(size)]
    sent = scale_(plain.clone() if prescale_factor != 1.0 else plain, prescale_factor)
    if group is None:
        return Handle(None, [], lambda: scale_(sent.clone(), postscale_factor))
    # An all-to-all and a local sum: each row crosses the network once, and any type and row count will do.
    parts = plain.new_empty((size, counts[rank], *plain.shape[1:]))
    width = plain.shape[1:].numel() * plain.element_size()
    work = group.alltoall(_raw(parts), _raw(sent), [counts[rank] * width] * size, [n * width for n in counts])

    def finish() -> torch.Tensor:
        total = parts.sum(dim=0, dtype=plain.dtype)
        return scale_(total, postscale_factor / (size if op is Average else 1))

    return Handle(group, [work], finish)


def join(device: int = -1) -> int:
    """Say that this rank has no more data; take part in the others' collectives until all have said so.

    A rank that has joined adds nothing to an allreduce (averages are still over all ranks) and no rows to an allgather.
    Its model is not updated: take over that of the rank that joined last.

    Args:
        device: accepted for Horovod's sake.

    Returns: the rank that joined last, the same on every rank.

    Raises:
        UsageError: another rank called something meanwhile that this one cannot take part in, such as an all-to-all.
    """
    group = process.group()
    return 0 if group is None else group.log.join(group)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member has called it."""
    if outside_world():
        return
    group = process_set.group()
    if group is not None:
        token = torch.zeros(1, dtype=torch.uint8)
        group.wait(group.allreduce(token, Sum.gloo))
