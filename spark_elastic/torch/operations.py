"""Functions for PyTorch besides the optimizer: differentiable collectives, broadcasts of a model, and the device.

Collectives return new tensors; their gradients are those that Horovod defines. To add one, write it here and add its
name to `__all__`: `spark_elastic.torch` exports all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Function

from spark_elastic.collective import operations as collectives
from spark_elastic.collective.gpu.devices import choose_device, device_info, device_setting
from spark_elastic.collective.gpu.leases import lease_gpu
from spark_elastic.collective.gpu.nccl import warm_up
from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.collective.operations import is_provisional
from spark_elastic.collective.operators import (
    Average,
    Compression,
    Compressor,
    ReduceOp,
    Sum,
    reduce_compressed,
    resolve_op,
)
from spark_elastic.collective.process import local_rank, process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "device",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, is_grouped: bool, name: str | None, how: Any, *tensors: torch.Tensor) -> Any:
        ctx.is_grouped, ctx.how = is_grouped, how
        if is_grouped:
            return tuple(collectives.grouped_allreduce_async(tensors, None, name, *how).wait())
        return (collectives.allreduce_async(tensors[0], None, name, *how).wait(),)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *_Allreduce.apply(ctx.is_grouped, None, ctx.how, *grads)


def _reduced(
    tensors: Sequence[torch.Tensor], compression: type[Compressor], op: ReduceOp, is_grouped: bool, name: Any, *how: Any
) -> list[torch.Tensor]:
    """Reduce tensors; `how` is both factors and the process set."""

    def reduce(operator: ReduceOp, sent: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        reduced: tuple[torch.Tensor, ...] = _Allreduce.apply(is_grouped, name, (operator, *how), *sent)
        return reduced

    return reduce_compressed(tensors, compression, op, how[-1].size(), reduce)


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
    """Return the average (or `op`) of the members' tensors as a new tensor; the gradient is reduced in the same way.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    how = (prescale_factor, postscale_factor, process_set)
    return _reduced([tensor], compression, resolve_op(op, average), False, name, *how)[0]


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
    """Reduce several tensors at once, each as `allreduce` does."""
    how = (prescale_factor, postscale_factor, process_set)
    return _reduced(tensors, compression, resolve_op(op, average), True, name, *how)


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.process_set = process_set
        return tuple(collectives.grouped_allgather_async(tensors, name, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows = [shape[0] if len(shape) else 1 for shape in ctx.shapes]
        counts = collectives.allgather_async(torch.tensor([rows], device="cpu"), None, ctx.process_set).wait()
        starts = counts[: ctx.process_set.rank()].sum(dim=0).tolist()
        reduced = grouped_allreduce(grads, op=Average, process_set=ctx.process_set)
        parts = [
            whole[start : start + count].reshape(shape)
            for whole, start, count, shape in zip(reduced, starts, rows, ctx.shapes, strict=True)
        ]
        return None, None, *parts


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the members' tensors, concatenated along the first dimension, whose size may differ between them.

    The gradient is the average of the members' gradients for this member's rows.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors, each as `allgather` does."""
    return list(_Allgather.apply(process_set, name, *tensors)) if tensors else []


class _Broadcast(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return collectives.broadcast_async(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduced = allreduce(grad, op=Average, process_set=ctx.process_set)
        is_root = ctx.process_set.rank() == ctx.process_set.set_rank_of(ctx.root_rank)
        return (reduced if is_root else torch.zeros_like(reduced)), None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of `root_rank` as a new tensor. The root's gradient is the average of all members'."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        if splits is None and tensor.dim() and tensor.shape[0] % process_set.size() == 0:
            splits = [tensor.shape[0] // process_set.size()] * process_set.size()
        out, received = collectives.alltoall_async(tensor, splits, name, process_set).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        return alltoall(grad.contiguous(), ctx.received, process_set=ctx.process_set)[0], None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows of `tensor` to each rank r, in order, and concatenate the received rows in rank order.

    Returns:
        The tensor, or (tensor, received splits) if `splits` was given.

    Raises:
        UsageError: the splits do not add up to the rows, or the rows cannot be divided equally.
    """
    out, received = _Alltoall.apply(tensor, splits, name, process_set)
    return out if splits is None else (out, received)


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, how: Any, *tensors: torch.Tensor) -> Any:
        name, *ctx.how = how
        return tuple(collectives.grouped_reducescatter_async(tensors, name, *ctx.how).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, process_set, prescale, postscale = ctx.how
        factor = prescale * postscale * (process_set.size() if op is Sum else 1)
        return None, *grouped_allgather([grad * factor for grad in grads], process_set=process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the members' average (or sum); the first ranks may get one row more."""
    settings = (compression, op, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, *settings)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors, each as `reducescatter` does."""
    if not tensors:
        return []
    sent = [compression.compress(tensor) for tensor in tensors]
    how = (name, op, process_set, prescale_factor, postscale_factor)
    outs = _Reducescatter.apply(how, *(tensor for tensor, _ in sent))
    return [compression.decompress(out, context) for out, (_, context) in zip(outs, sent, strict=True)]


log = logging.getLogger("spark_elastic.torch")


def device(asked: str | None = None) -> torch.device:
    """Return the device for the model and its batches; if it is a GPU, make it the current one of this process.

    Of several GPUs, which a worker sees if Spark assigns none, it leases one, and keeps it until its process ends. Call
    this before the elastic loop: a newcomer then loads what a GPU needs while the others still train.

    Args:
        asked: "auto", "cpu", "cuda" or "cuda:N"; by default the `device` of `spark_elastic.run`, or "auto".

    Raises:
        InvalidSettingsError: there is no such device here; the message has the remedy.
        NotInitializedError: `init` has not been called.
    """
    rank = local_rank()
    chosen = choose_device(
        device_setting() if asked is None else asked, device_info(), lambda gpus: lease_gpu(gpus, rank)
    )
    log.info("this worker computes on %s: %s", chosen.device, chosen.reason)
    found = torch.device(chosen.device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
        if process.is_newcomer:  # no other worker waits for it yet
            warm_up(found)
    return found


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite the tensors of a `state_dict()`, `named_parameters()` or a list of tensors with those of `root_rank`.

    Raises:
        UsageError: `params` is something else.
    """
    if is_provisional():
        return
    if isinstance(params, Mapping):
        values: list[Any] = [params[key] for key in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        values = [item[1] if isinstance(item, tuple) else item for item in params]
    else:
        raise UsageError(f"broadcast_parameters takes a dict or a list of tensors, not {type(params).__name__}")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    broadcast_tensors(tensors, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the state and the options (such as the learning rate) of an optimizer with those of `root_rank`.

    The state of an optimizer that has made no step yet is created. If the root's optimizer has made no step either,
    parameters without a gradient get one of zeros, as with Horovod.

    Args:
        optimizer: the optimizer to change.
        root_rank: the rank to copy from.
        model: the model, to find the parameters with sparse gradients.
        process_set: the processes that take part.
    """
    from spark_elastic.elastic.handlers import take_over
    from spark_elastic.torch.elastic.handlers import OptimizerStateHandler

    if is_provisional():
        return
    handlers = {"optimizer": OptimizerStateHandler(optimizer)}
    if not take_over(handlers, root_rank, extra=not optimizer.state, process_set=process_set):
        return
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    layers = () if model is None else (module for module in model.modules() if isinstance(module, embeddings))
    sparse = {id(layer.weight) for layer in layers if layer.sparse}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                wants_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
                parameter.grad = zeros.to_sparse(1) if wants_sparse else zeros
