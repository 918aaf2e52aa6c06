"""Collectives on tensors, with the names and arguments that Horovod users know.

The members of a group compare what they call before any data is sent, see `negotiation`: collectives match by their
`name`, those without one by their order among those of their kind. In a world of one they return their input, and so
they do before the elastic loop in a newcomer and in a process that runs its function again: the loop brings the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.handles import Handle
from spark_elastic.collective.negotiation import Launched
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp, Sum, resolve_op, scale_, wire_type
from spark_elastic.errors import OutsideLoopError, UsageError

# --- what all have in common ------------------------------------------------------------------------


def _queued(group: GlooGroup, kind: str, name: str | None, what: str, launch: Callable[[], Launched] | None) -> Handle:
    return Handle(group, [], None, group.negotiation.queue(kind, name, what, launch))


def _refused(group: GlooGroup | None, kind: str, name: str | None, error: UsageError) -> UsageError:
    """The error to raise; the other members learn of it when they wait for this collective."""
    if group is not None:
        group.negotiation.queue(kind, name, "", None, problem=str(error))
    return error


def shaped(tensor: torch.Tensor, rows: bool = True) -> str:
    """Its type and shape. rows: whether the first dimension matters."""
    shape = list(tensor.shape) if rows else ["any", *tensor.shape[1:]]
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def _scaled(what: str, op: ReduceOp, prescale: float, postscale: float) -> str:
    factors = "" if prescale == postscale == 1.0 else f", factors {prescale} and {postscale}"
    return f"{what}, op={op.name}{factors}"


def agree(group: GlooGroup | None, kind: str, what: str = "", name: str | None = None, detail: str = "") -> bool:
    """Wait until all members have called this, with the same `what`.

    Returns: whether it is known that all have the same `detail`; on all members alike.

    Raises: MismatchError, HorovodInternalError.
    """
    if group is None:
        return True
    pending = group.negotiation.queue(kind, name, what, None, detail=detail)
    group.negotiation.bring(pending)
    return pending.alike


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
    how = resolve_op(op, average)
    group = process_set.group()
    plain = tensor.detach()
    try:
        operator = how.gloo
        dtype = wire_type(plain.dtype)
    except UsageError as error:
        raise _refused(group, "allreduce", name, error) from None
    if group is None:
        scale_(plain, prescale_factor)
        scale_(plain, postscale_factor)
        return Handle(None, [], lambda: tensor)
    members = group

    def launch() -> Launched:
        wire = plain.to(dtype).contiguous()
        scale_(wire, prescale_factor)
        work = members.allreduce(wire, operator) if wire.numel() else None
        divisor = members.size if how is Average else 1

        def finish() -> torch.Tensor:
            scale_(wire, postscale_factor / divisor)
            if wire.data_ptr() != plain.data_ptr():
                plain.copy_(wire)
            return tensor

        return [] if work is None else [work], finish

    return _queued(group, "allreduce", name, _scaled(shaped(plain), how, prescale_factor, postscale_factor), launch)


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
    how = resolve_op(op, average)
    group = process_set.group()
    outputs = list(tensors)
    try:
        operator = how.gloo
        for tensor in outputs:
            wire_type(tensor.dtype)
    except UsageError as error:
        raise _refused(group, "grouped_allreduce", name, error) from None
    if group is None:
        for tensor in outputs:
            scale_(tensor.detach(), prescale_factor)
            scale_(tensor.detach(), postscale_factor)
        return Handle(None, [], lambda: outputs)
    members = group

    def launch() -> Launched:
        factor = postscale_factor / (members.size if how is Average else 1)
        works = []
        packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for alike in _by_type(outputs):
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            flat = flat.to(wire_type(flat.dtype))
            scale_(flat, prescale_factor)
            if flat.numel():
                works.append(members.allreduce(flat, operator))
            packed.append((flat, alike))

        def finish() -> list[torch.Tensor]:
            for flat, alike in packed:
                scale_(flat, factor)
                pieces = flat.split([tensor.numel() for tensor in alike])
                for tensor, piece in zip(alike, pieces, strict=True):
                    tensor.copy_(piece.view_as(tensor))
            return outputs

        return works, finish

    shapes = "; ".join(map(shaped, outputs))
    what = _scaled(shapes, how, prescale_factor, postscale_factor)
    return _queued(group, "grouped_allreduce", name, what, launch)


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


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Add up (or average) the members' sparse tensors: their entries, one after the other.

    Returns: a handle for `synchronize` and `poll`; as with Horovod, calling it gives the result, too.

    Raises: UsageError: another operator, or a tensor that is not sparse.
    """
    group = process_set.group()
    problem = ""
    if op not in (Average, Sum):
        problem = f"sparse tensors are reduced with op=hvd.Average or op=hvd.Sum, not {op}"
    elif not tensor.is_sparse:
        problem = "sparse_allreduce_async takes a sparse COO tensor; for others there is allreduce_async"
    if problem:
        raise _refused(group, "sparse_allreduce", name, UsageError(problem))
    if group is None:
        return SparseHandle(None, [], tensor.clone)
    members = group

    def launch() -> Launched:
        launched = [start_allgather(members, part) for part in _entries(tensor)]
        divisor = members.size if op is Average else 1

        def finish() -> torch.Tensor:
            indices, values = (complete() for _, complete in launched)
            return torch.sparse_coo_tensor(indices.t(), values / divisor if divisor > 1 else values, tensor.shape)

        return [work for works, _ in launched for work in works], finish

    pending = group.negotiation.queue("sparse_allreduce", name, f"{shaped(tensor)}, op={op.name}", launch)
    return SparseHandle(group, [], None, pending)


class SparseHandle(Handle):
    """As `Handle`; Horovod gives out a function here."""

    __slots__ = ()

    def __call__(self) -> torch.Tensor:
        result: torch.Tensor = self.wait()
        return result


def _entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, shape (entries, dimensions), and values."""
    sparse = tensor.detach().coalesce()
    return sparse.indices().t().contiguous(), sparse.values()


# --- allgather, broadcast -------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Concatenate the members' tensors along the first dimension, in rank order.

    The first dimension may differ between members, the others may not. A scalar counts as a tensor of one row.
    """
    group = process_set.group()
    plain = _with_rows(tensor)
    if group is None:
        return Handle(None, [], plain.clone)
    members = group
    return _queued(group, "allgather", name, shaped(plain, rows=False), lambda: start_allgather(members, plain))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `allgather_async`, of several tensors; the handle's result is a list."""
    group = process_set.group()
    plain = [_with_rows(tensor) for tensor in tensors]
    if group is None:
        return Handle(None, [], lambda: [tensor.clone() for tensor in plain])
    members = group

    def launch() -> Launched:
        return _all_of([start_allgather(members, tensor) for tensor in plain])

    what = "; ".join(shaped(tensor, rows=False) for tensor in plain)
    return _queued(group, "grouped_allgather", name, what, launch)


def _all_of(launched: Sequence[Launched]) -> Launched:
    return [work for works, _ in launched for work in works], lambda: [finish() for _, finish in launched]


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return (plain.reshape(1) if plain.dim() == 0 else plain).contiguous()


def start_allgather(group: GlooGroup, plain: torch.Tensor) -> Launched:
    """Launch it without comparing what the members call."""
    rows = _row_counts(group, plain)
    most = max(rows)
    if most * plain.shape[1:].numel() == 0:
        return [], lambda: plain.new_empty((sum(rows), *plain.shape[1:]))
    sent = plain if plain.shape[0] == most else _padded(plain, most)
    out = plain.new_empty((group.size, most, *plain.shape[1:]))
    work = group.allgather(as_bytes(out), as_bytes(sent))

    def finish() -> torch.Tensor:
        if min(rows) == most:
            return out.flatten(0, 1)
        return torch.cat([out[rank, :count] for rank, count in enumerate(rows)])

    return [work], finish


def _row_counts(group: GlooGroup, tensor: torch.Tensor) -> list[int]:
    """First dimension on each member."""
    everyone = torch.empty(group.size, dtype=torch.int64)
    group.wait(group.allgather(everyone, torch.tensor([tensor.shape[0]])))  # a rank that has joined sends zero
    return [int(count) for count in everyone]


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    out = tensor.new_zeros((rows, *tensor.shape[1:]))
    out[: tensor.shape[0]] = tensor
    return out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, shape (bytes,): Gloo moves fewer types than torch has, but bytes it always
    moves."""
    if not tensor.numel():  # such a one may have a stride of 0, which no other type can be seen through
        return tensor.new_empty(0, dtype=torch.uint8)
    # not by `view(-1)`: a single element counts as contiguous whatever its stride is, and keeps that
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
    plain = tensor.detach()
    try:
        root = process_set.place_of(root_rank)
    except UsageError as error:
        raise _refused(group, "broadcast", name, error) from None
    if group is None:
        return Handle(None, [], lambda: tensor)
    members = group

    def launch() -> Launched:
        wire = plain.contiguous()
        works = [members.broadcast(as_bytes(wire), root)] if wire.numel() else []

        def finish() -> torch.Tensor:
            if wire.data_ptr() != plain.data_ptr():
                plain.copy_(wire)
            return tensor

        return works, finish

    return _queued(group, "broadcast", name, f"{shaped(plain)}, root_rank={root_rank}", launch)


def outside_world() -> bool:
    """Whether this process is a newcomer with a provisional position only. Raises: NotInitializedError."""
    process.require()
    return process.provisional


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
        OutsideLoopError: a newcomer before the elastic loop gave splits for several ranks.
    """
    group = process_set.group()
    if outside_world() and splits is not None and len(splits) != 1:
        raise OutsideLoopError(
            f"alltoall was given rows for {len(splits)} ranks before the elastic loop, where this worker, which joins "
            "a job that is already running, reaches none of them; move the call into the function decorated with "
            "hvd.elastic.run"
        )
    plain = tensor.detach().contiguous()
    size = process_set.size()
    try:
        sent = _split(plain, splits, size)
    except UsageError as error:
        raise _refused(group, "alltoall", name, error) from None
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def result(out: torch.Tensor, received: list[int]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return out if splits is None else (out, torch.tensor(received, dtype=dtype))

    if group is None:
        return Handle(None, [], lambda: result(plain.clone(), sent))
    members = group

    def launch() -> Launched:
        incoming = torch.empty(size, dtype=torch.int64)
        ones = [1] * size
        members.wait(members.alltoall(incoming, torch.tensor(sent), ones, ones))
        received = [int(count) for count in incoming]
        out = plain.new_empty((sum(received), *plain.shape[1:]))
        width = plain.shape[1:].numel() * plain.element_size()
        bytes_in, bytes_out = [n * width for n in received], [n * width for n in sent]
        return [members.alltoall(as_bytes(out), as_bytes(plain), bytes_in, bytes_out)], lambda: result(out, received)

    return _queued(group, "alltoall", name, shaped(plain, rows=False), launch)


def _split(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Rows for each member. Raises: UsageError."""
    if tensor.dim() == 0:
        raise UsageError("alltoall needs a tensor with rows, not a scalar")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(f"{rows} rows cannot be divided equally among {size} ranks; give splits=")
        return [rows // size] * size
    if isinstance(splits, torch.Tensor) and (splits.dtype.is_floating_point or splits.dim() != 1):
        raise UsageError(f"splits must be a vector of integers, not {shaped(splits)}")
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
    """Reduce, then keep this rank's part of the rows; the first ranks have one row more if they do not divide.

    Raises:
        UsageError: for another operator than Average or Sum, or a scalar.
    """
    handle = grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)
    return handle.taking(_only)


def _only(parts: list[torch.Tensor]) -> torch.Tensor:
    (part,) = parts
    return part


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter_async`, of several tensors; the handle's result is a list."""
    group = process_set.group()
    plain = [tensor.detach().contiguous() for tensor in tensors]
    try:
        for tensor in plain:
            _check_scatter(tensor, op)
    except UsageError as error:
        raise _refused(group, "reducescatter", name, error) from None
    if group is None:
        return Handle(
            None, [], lambda: [scale_(scale_(part.clone(), prescale_factor), postscale_factor) for part in plain]
        )
    members = group

    def launch() -> Launched:
        factor = postscale_factor / (members.size if op is Average else 1)
        return _all_of([_start_reducescatter(members, tensor, prescale_factor, factor) for tensor in plain])

    what = _scaled("; ".join(map(shaped, plain)), op, prescale_factor, postscale_factor)
    return _queued(group, "reducescatter", name, what, launch)


def _check_scatter(tensor: torch.Tensor, op: ReduceOp) -> None:
    """Raises: UsageError."""
    _ = op.gloo
    if op not in (Average, Sum):
        raise UsageError(f"reducescatter knows op=hvd.Average and op=hvd.Sum, not {op}")
    if tensor.dim() == 0:
        raise UsageError("reducescatter needs a tensor with rows, not a scalar")


def _start_reducescatter(group: GlooGroup, plain: torch.Tensor, before: float, after: float) -> Launched:
    """An all-to-all and a local sum: each row crosses the network once, and any type and row count will do."""
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
        # of 16 bits, what would overflow before it is divided need not afterwards
        wide = torch.float32 if plain.dtype in (torch.float16, torch.bfloat16) else plain.dtype
        return scale_(parts.sum(dim=0, dtype=wide), after).to(plain.dtype)

    return works, finish


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
    if group is None:
        return 0
    group.negotiation.settle()
    last = group.log.join(group)
    group.negotiation.start_anew()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member has called it."""
    if outside_world():
        return
    agree(process_set.group(), "barrier")
