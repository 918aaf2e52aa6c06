"""Variables taken over from one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import torch

from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.collective.operations import outside_world
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError
from spark_elastic.tensorflow.tensors import array_from, array_of, torch_of


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

    Raises:
        HorovodInternalError: a peer is gone; no variable has been touched.
        UsageError: it was called inside of a tf.function.
    """
    if not tf.executing_eagerly():
        raise UsageError("broadcast_variables is called outside of tf.function, once the variables are there")
    targets = list(variables)
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
