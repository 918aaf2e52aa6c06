"""Collectives on TensorFlow tensors, and broadcasts of variables, with Horovod's names and arguments.

They work eagerly and inside a `tf.function`, and have the gradients that Horovod defines. `name`, `device_dense` and
`device_sparse` have no effect: members' calls are matched by their order, which must be the same on every member. In a
world of one they return their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from spark_elastic.collective import operations as on_torch
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
from spark_elastic.collective.process import local_rank, local_size
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UnsupportedOperationError
from spark_elastic.tensorflow.host import (
    Array,
    array_from,
    call_host,
    call_with_gradient,
    compressors,
    native,
    torch_of,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

# --- allreduce ----------------------------------------------------------------------------------


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the average (or `op`) of the members' tensors; the gradient is reduced in the same way.

    The entries of `tf.IndexedSlices` are concatenated, so entries with equal indices are summed when they are applied.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the operator is not supported for this class of tensor.
    """
    op = resolve_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, op, prescale_factor, postscale_factor, process_set)
    how = (compression, op, prescale_factor, postscale_factor, process_set)
    return _reduced([tf.convert_to_tensor(tensor)], how)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Apply `allreduce` to several tensors; tensors of one type share a collective."""
    op = resolve_op(op, average)
    if not tensors:
        return []
    out = list(tensors)
    dense = [at for at, tensor in enumerate(out) if not isinstance(tensor, tf.IndexedSlices)]
    how = (compression, op, prescale_factor, postscale_factor, process_set)
    for at, result in zip(dense, _reduced([tf.convert_to_tensor(out[at]) for at in dense], how), strict=True):
        out[at] = result
    for at in set(range(len(out))) - set(dense):
        out[at] = _allreduce_slices(out[at], op, prescale_factor, postscale_factor, process_set)
    return out


_How = tuple[type[Compressor], ReduceOp, float, float, ProcessSet]


def _reduced(tensors: list[tf.Tensor], how: _How) -> list[tf.Tensor]:
    if not tensors:
        return []
    compression, op, prescale, postscale, process_set = how
    in_graph, on_wire = compressors(compression)
    packed = [in_graph.compress(tensor) for tensor in tensors]

    def on_host(*arrays: Array) -> list[Array]:
        def reduce(operator: ReduceOp, sent: list[torch.Tensor]) -> list[torch.Tensor]:
            return on_torch.grouped_allreduce_async(sent, None, None, operator, prescale, postscale, process_set).wait()

        tensors = [torch_of(array) for array in arrays]
        return [array_from(result) for result in reduce_compressed(tensors, on_wire, op, process_set.size(), reduce)]

    @tf.custom_gradient
    def reduce(*sent: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: tf.Tensor) -> Any:
            return _reduced(list(upstream), how)

        return call_host(on_host, sent, [each.dtype for each in sent], [each.shape for each in sent]), gradient

    received = reduce(*(each for each, _ in packed))
    received = list(received) if isinstance(received, (list, tuple)) else [received]
    return [in_graph.decompress(each, context) for each, (_, context) in zip(received, packed, strict=True)]


def _allreduce_slices(
    slices: tf.IndexedSlices, op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet
) -> tf.IndexedSlices:
    if op not in (Average, Sum):
        raise UnsupportedOperationError(
            f"IndexedSlices can be reduced with op=hvd.Average or op=hvd.Sum only; got {op}"
        )
    values = allgather(slices.values, process_set=process_set)
    indices = allgather(slices.indices, process_set=process_set)
    factor = float(prescale * postscale)
    if factor != 1.0 and (values.dtype.is_floating or factor.is_integer()):
        values *= tf.cast(factor, values.dtype)
    elif factor != 1.0:  # integers keep their type, and are rounded towards zero
        values = tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)
    if op is Average:
        # not rounded for integers: the fractions of one index are summed later
        values = values / tf.cast(_of_process(process_set.size), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


# --- allgather, broadcast -------------------------------------------------------------------------


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Concatenate the members' tensors in rank order along the first dimension, whose size may differ between them.

    The gradient of each member's rows is the average over the members, as with Horovod.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the other dimensions differ.
    """
    plain = tf.convert_to_tensor(tensor)
    sent = tf.reshape(plain, [1]) if plain.shape.rank == 0 else plain

    def gather(array: Array) -> list[Array]:
        return [array_from(on_torch.allgather_async(torch_of(array), process_set=process_set).wait())]

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        rows = allgather(tf.shape(sent)[:1], process_set=process_set)
        before = tf.reduce_sum(rows[: _of_process(process_set.rank)])
        averaged = allreduce(upstream, op=Average, process_set=process_set)
        return averaged[before : before + tf.shape(sent)[0]]

    return call_with_gradient(gather, sent, [None, *sent.shape[1:]], gradient)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Apply `allgather` to each tensor."""
    return [allgather(tensor, process_set=process_set) for tensor in tensors]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of `root_rank`; type and shape must be the same on every member.

    The gradient is the average over the members on the root, and zero elsewhere, as with Horovod.
    """

    def send(array: Array) -> list[Array]:
        return [array_from(on_torch.broadcast_async(torch_of(array), root_rank, process_set=process_set).wait())]

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        averaged = allreduce(upstream, op=Average, process_set=process_set)
        is_root = tf.equal(_of_process(process_set.rank), root_rank)
        return tf.where(is_root, averaged, tf.zeros_like(averaged))

    sent = tf.convert_to_tensor(tensor)
    return call_with_gradient(send, sent, sent.shape, gradient)


# --- alltoall, reducescatter, barrier -------------------------------------------------------------


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows of `tensor` to each rank r, and concatenate the received rows in rank order.

    Without `splits` the rows are divided equally.

    Returns:
        The received rows; if `splits` was given, (received rows, received splits as int32).
    """
    rows = tf.convert_to_tensor(tensor)
    given = None if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    received, counts = _exchanged(rows, given, process_set)
    return received if splits is None else (received, counts)


def _exchanged(rows: tf.Tensor, splits: tf.Tensor | None, process_set: ProcessSet) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the received rows, and the number of rows from each rank."""

    def on_host(array: Array, *sent: Array) -> list[Array]:
        rows, size = array.shape[0] if array.ndim else 0, process_set.size()
        counts = torch.from_numpy(np.array(sent[0] if sent else [rows // size] * size, np.int32))
        if not sent and (rows % size or not array.ndim):
            on_torch.alltoall_async(torch_of(array), None, process_set=process_set)  # raises the error
        # other members may send different numbers of rows; the gradient needs these numbers
        result, received = on_torch.alltoall_async(torch_of(array), counts, process_set=process_set).wait()
        return [array_from(result), received.numpy().astype(np.int32)]

    @tf.custom_gradient
    def exchange(rows: tf.Tensor, *given: tf.Tensor) -> tuple[Any, Callable[..., Any]]:
        returned = call_host(on_host, [rows, *given], [rows.dtype, tf.int32], [[None, *rows.shape[1:]], [None]])

        def gradient(upstream: tf.Tensor, *_: tf.Tensor) -> Any:
            back, _counts = _exchanged(upstream, returned[1], process_set)
            return (back, None) if given else back

        return returned, gradient

    received, counts = exchange(rows) if splits is None else exchange(rows, splits)
    return received, counts


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Average (or sum) the members' tensors, and return this rank's rows; the first ranks may get one row more.

    The gradient is the concatenation of the members' gradients, times the size with `op=hvd.Sum`, as with Horovod.

    Raises:
        UsageError: the operator is neither Average nor Sum.
    """
    in_graph, on_wire = compressors(compression)

    def scatter(array: Array) -> list[Array]:
        sent, context = on_wire.compress(torch_of(array))
        result = on_torch.reducescatter_async(sent, None, op, process_set, prescale_factor, postscale_factor).wait()
        return [array_from(on_wire.decompress(result, context))]

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        factor = tf.cast(prescale_factor * postscale_factor, upstream.dtype)
        if op is Sum:
            factor *= tf.cast(_of_process(process_set.size), upstream.dtype)
        return allgather(upstream * factor, process_set=process_set)

    sent, context = in_graph.compress(tf.convert_to_tensor(tensor))
    return in_graph.decompress(call_with_gradient(scatter, sent, [None, *sent.shape[1:]], gradient), context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Apply `reducescatter` to each tensor."""
    settings = (compression, op, None, process_set, prescale_factor, postscale_factor)
    return [reducescatter(tensor, "", *settings) for tensor in tensors]


# --- the process, as tensors ------------------------------------------------------------------------


def size_op(process_set: ProcessSet = global_process_set, name: str | None = None) -> tf.Tensor:
    """Return the number of processes when the graph runs: int32, shape ()."""
    return _of_process(process_set.size)


def rank_op(process_set: ProcessSet = global_process_set, name: str | None = None) -> tf.Tensor:
    """Return the rank of this process when the graph runs: int32, shape ()."""
    return _of_process(process_set.rank)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of processes on this host when the graph runs: int32, shape ()."""
    return _of_process(local_size)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the local rank of this process when the graph runs: int32, shape ()."""
    return _of_process(local_rank)


def _of_process(query: Callable[[], int]) -> tf.Tensor:
    return call_host(lambda: [np.array(query(), np.int32)], [], [tf.int32], [[]])[0]


# --- broadcasts of variables ------------------------------------------------------------------------


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Set variables of TensorFlow or Keras to the values of `root_rank`, in few large messages.

    Inside a `tf.function` it is part of the graph, which all ranks must run equally often. A new worker may call it
    before the elastic loop: there it does nothing, because the loop sends the state.

    Args:
        variables: the variables, with the same types and shapes and in the same order on every member.
        root_rank: rank of the member whose values are sent.
        process_set: the processes to broadcast to.
        inplace: has no effect; for compatibility with Horovod.

    Raises:
        HorovodInternalError: a peer is gone; no variable was changed.
    """
    if tf.executing_eagerly() and (is_provisional() or process_set.group() is None):
        return

    def on_host(*arrays: Array) -> list[Array]:
        tensors = [torch_of(array).clone() for array in arrays]
        if not is_provisional() and process_set.group() is not None:
            broadcast_tensors(tensors, root_rank, process_set)
        return [array_from(tensor) for tensor in tensors]

    own = [native(variable) for variable in variables]
    values = [variable.read_value() for variable in own]
    if values:
        received = call_host(on_host, values, [value.dtype for value in values], [value.shape for value in values])
        for variable, value in zip(own, received, strict=True):
            variable.assign(value)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Broadcast variables as `broadcast_variables` does, and return their values."""
    targets = list(variables)
    broadcast_variables(targets, root_rank, process_set)
    return [native(variable).read_value() for variable in targets]


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error, because TensorFlow 2 and Keras 3 keep no list of all variables.

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        "broadcast_global_variables needs the global variables of TensorFlow 1, which TensorFlow 2 does not have; use "
        "broadcast_variables(model.variables, root_rank=0), or BroadcastGlobalVariablesCallback(0) with model.fit"
    )
