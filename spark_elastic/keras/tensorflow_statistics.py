"""Sums over the members within a forward or backward pass of TensorFlow, eagerly or inside of a `tf.function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch

from spark_elastic.collective.fused import add_up, excluded, group_of
from spark_elastic.collective.process_sets import ProcessSet
from spark_elastic.tensorflow.host import call_host
from spark_elastic.tensorflow.tensors import Array, torch_of


def added_up(numbers: Any, process_set: ProcessSet) -> Any:
    """Return the sums of the members' numbers, float64, (n,). Their gradients are the sums of the members' gradients.

    Raises: HorovodInternalError: a peer is gone. In a graph it arrives as one of TensorFlow's errors.
    """

    def forward(*arrays: Array) -> list[Array]:
        return [_sums(arrays[0], process_set).numpy()]

    def backward(*arrays: Array) -> list[Array]:
        sums = _sums(arrays[0], process_set)
        return [(sums.zero_() if excluded() else sums).numpy()]

    @tf.custom_gradient
    def reduced(sent: Any) -> tuple[Any, Callable[..., Any]]:
        def gradient(upstream: Any) -> Any:
            return call_host(backward, [upstream], [upstream.dtype], [upstream.shape])[0]

        return call_host(forward, [sent], [sent.dtype], [sent.shape])[0], gradient

    return reduced(numbers)


def _sums(array: Array, process_set: ProcessSet) -> torch.Tensor:
    # a copy: the memory is TensorFlow's, and in a world of one it would come back as it is
    numbers = torch_of(array).clone()
    if excluded():
        numbers.zero_()
    group = group_of(process_set)
    return numbers if group is None else add_up(group, numbers)
