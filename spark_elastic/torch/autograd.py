"""The collectives that return new tensors, with gradients through them as Horovod defines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from spark_elastic.collective import operations as raw
from spark_elastic.collective.compression import Compression, Compressor
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp, Sum, chosen


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        op, prescale, postscale, process_set = how
        return raw.allreduce_async(tensor, None, None, op, prescale, postscale, process_set).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Allreduce.apply(grad, *ctx.how), None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The average (or `op`) of the members' tensors; `tensor` is not modified.

    The gradient is reduced in the same way.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    sent, context = compression.compress(tensor)
    out = _Allreduce.apply(sent, chosen(op, average), prescale_factor, postscale_factor, process_set)
    return compression.decompress(out, context)


class _GroupedAllreduce(Function):
    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        op, prescale, postscale, process_set = how
        return tuple(raw.grouped_allreduce_async(tensors, None, None, op, prescale, postscale, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *_GroupedAllreduce.apply(ctx.how, *grads))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As `allreduce`, of several tensors at once."""
    sent = [compression.compress(tensor) for tensor in tensors]
    how = (chosen(op, average), prescale_factor, postscale_factor, process_set)
    outs = _GroupedAllreduce.apply(how, *(tensor for tensor, _ in sent))
    return [compression.decompress(out, context) for out, (_, context) in zip(outs, sent, strict=True)]


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
        ctx.shape = tensor.shape
        ctx.process_set = process_set
        return raw.allgather_async(tensor, None, process_set).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = ctx.shape[0] if len(ctx.shape) else 1
        counts = raw.allgather_async(torch.tensor([rows]), None, ctx.process_set).wait()
        start = int(counts[: ctx.process_set.rank()].sum())
        reduced = allreduce(grad, op=Average, process_set=ctx.process_set)
        return reduced[start : start + rows].reshape(ctx.shape), None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The members' tensors, concatenated along the first dimension, which may differ between them.

    The gradient is the average of the members' gradients for this member's rows.
    """
    return _Allgather.apply(tensor, process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As `allgather`, of several tensors."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, process_set: ProcessSet) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return raw.broadcast_async(tensor, root_rank, None, process_set).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduced = allreduce(grad, op=Average, process_set=ctx.process_set)
        return (reduced if ctx.process_set.rank() == ctx.root_rank else torch.zeros_like(reduced)), None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of `root_rank`, as a new tensor. The root's gradient is the average of all members'."""
    return _Broadcast.apply(tensor, root_rank, process_set)


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, process_set: ProcessSet) -> Any:
        if splits is None:
            splits = [tensor.shape[0] // process_set.size()] * process_set.size()
        out, received = raw.alltoall_async(tensor, splits, None, process_set).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        return alltoall(grad.contiguous(), ctx.received, process_set=ctx.process_set)[0], None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows to each rank r and concatenate what arrives; (tensor, received splits) if given splits.

    Raises:
        UsageError: the splits do not add up to the rows, or the rows cannot be divided equally.
    """
    if splits is None and tensor.shape[0] % process_set.size():
        raw.alltoall_async(tensor, None, None, process_set)  # says what is wrong
    out, received = _Alltoall.apply(tensor, splits, process_set)
    return out if splits is None else (out, received)


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        op, process_set, prescale, postscale = how
        return raw.reducescatter_async(tensor, None, op, process_set, prescale, postscale).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        op, process_set, prescale, postscale = ctx.how
        factor = prescale * postscale * (process_set.size() if op is Sum else 1)
        return allgather(grad * factor, process_set=process_set), None, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the average (or sum) of the members' tensors; the first ranks have a row more if need be."""
    sent, context = compression.compress(tensor)
    out = _Reducescatter.apply(sent, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(out, context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As `reducescatter`, of several tensors."""
    return [
        reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)
        for tensor in tensors
    ]
