"""Calls from a TensorFlow program to this process's Python, eagerly or from inside of a `tf.function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from spark_elastic.errors import HorovodInternalError
from spark_elastic.tensorflow.errors import marked
from spark_elastic.tensorflow.tensors import Array, array_of


def call_host(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
) -> list[tf.Tensor]:
    """What `function` makes of the values of `inputs`: tensors of these types and static shapes.

    In a graph the arrays that `function` gets are TensorFlow's own memory, and TensorFlow takes what it returns without
    a copy where that begins at a multiple of `ALIGN_BYTES`. Calls of one graph are made one after the other, in the
    order in which they were written.

    Functions that XLA compiles cannot do this; TensorFlow says so itself.

    Raises: HorovodInternalError: a peer is gone. In a graph it arrives as one of TensorFlow's errors.
    """
    if tf.executing_eagerly():
        # copied: what the function returns may be memory that it uses again
        return [tf.constant(result) for result in function(*(array_of(tensor) for tensor in inputs))]

    def guarded(*arrays: Array) -> Sequence[Array]:
        try:
            return function(*arrays)
        except HorovodInternalError as error:
            raise marked(error) from error

    returned = tf.numpy_function(guarded, list(inputs), list(dtypes))
    results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results
