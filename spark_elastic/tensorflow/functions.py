"""Broadcast variables from one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import torch

from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.collective.operations import outside_world
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UnsupportedOperationError
from spark_elastic.tensorflow.host import call_host
from spark_elastic.tensorflow.tensors import Array, array_from, array_of, native, torch_of


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Set variables of TensorFlow or Keras to the values of `root_rank`, in few large messages.

    Inside a `tf.function` it is part of the graph, which all ranks must run equally often. A new worker may call it
    before the elastic loop: there it does nothing, because the loop sends the state.

    Args:
        variables: with the same types and shapes, in the same order, on every member.
        root_rank: rank of the member whose values are sent.
        process_set: the processes to broadcast to.
        inplace: has no effect; for compatibility with Horovod.

    Raises:
        HorovodInternalError: a peer is gone; no variable was changed.
    """
    targets = list(variables)
    if not tf.executing_eagerly():
        _broadcast_in_graph(targets, root_rank, process_set)
        return
    group = None if outside_world() else process_set.group()
    if group is None or not targets:
        return
    tensors = [torch_of(array_of(native(variable))) for variable in targets]
    if group.rank != root_rank:
        tensors = [torch.empty_like(tensor) for tensor in tensors]
    broadcast_tensors(tensors, root_rank, process_set)
    if group.rank != root_rank:
        for variable, tensor in zip(targets, tensors, strict=True):
            variable.assign(array_from(tensor))


def _broadcast_in_graph(targets: list[Any], root_rank: int, process_set: ProcessSet) -> None:
    own = [native(variable) for variable in targets]

    def on_host(*arrays: Array) -> list[Array]:
        tensors = [torch_of(array).clone() for array in arrays]
        if not outside_world() and process_set.group() is not None:
            broadcast_tensors(tensors, root_rank, process_set)
        return [array_from(tensor) for tensor in tensors]

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
