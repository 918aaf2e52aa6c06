"""Variables taken over from one rank."""

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
from spark_elastic.tensorflow.tensors import Array, array_from, array_of, torch_of


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrite variables, of TensorFlow or Keras, with those of `root_rank`, in few large messages.

    A newcomer may call it before the elastic loop, where it does nothing: the loop brings it the state.

    Args:
        variables: of the same types and shapes, in the same order, on every member.
        inplace: accepted for Horovod's sake.

    Inside of a `tf.function` it is a part of the graph, which the ranks must run equally often.

    Raises: HorovodInternalError: a peer is gone; no variable has been touched.
    """
    targets = list(variables)
    if not tf.executing_eagerly():
        _broadcast_in_graph(targets, root_rank, process_set)
        return
    group = None if outside_world() else process_set.group()
    if group is None or not targets:
        return
    # a variable of Keras has TensorFlow's as its value
    own = [variable if isinstance(variable, tf.Variable) else variable.value for variable in targets]
    tensors = [torch_of(array_of(variable)) for variable in own]
    if group.rank != root_rank:
        tensors = [torch.empty_like(tensor) for tensor in tensors]
    broadcast_tensors(tensors, root_rank, process_set)
    if group.rank != root_rank:
        for variable, tensor in zip(targets, tensors, strict=True):
            variable.assign(array_from(tensor))


def _broadcast_in_graph(targets: list[Any], root_rank: int, process_set: ProcessSet) -> None:
    own = [variable if isinstance(variable, tf.Variable) else variable.value for variable in targets]

    def on_host(*arrays: Array) -> list[Array]:
        tensors = [torch_of(array).clone() for array in arrays]
        if not outside_world() and process_set.group() is not None:
            broadcast_tensors(tensors, root_rank, process_set)
        return [array_from(tensor) for tensor in tensors]

    values = [variable.read_value() for variable in own]
    if values:
        arrived = call_host(on_host, values, [value.dtype for value in values], [value.shape for value in values])
        for variable, value in zip(own, arrived, strict=True):
            variable.assign(value)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """As `broadcast_variables`; returns the values."""
    targets = list(variables)
    broadcast_variables(targets, root_rank, process_set)
    own = [variable if isinstance(variable, tf.Variable) else variable.value for variable in targets]
    return [variable.read_value() for variable in own]


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 and Keras 3 keep no list of all variables.

    Raises: UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        "broadcast_global_variables needs the global variables of TensorFlow 1, which do not exist here; use "
        "broadcast_variables(model.variables, root_rank=0), or BroadcastGlobalVariablesCallback(0) with model.fit"
    )
