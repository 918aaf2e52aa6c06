"""Calls from a TensorFlow program to this process's Python, eagerly or from inside of a `tf.function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.errors import FailedPreconditionError, InvalidArgumentError

from spark_elastic.errors import (
    HorovodInternalError,
    NotInitializedError,
    OutsideLoopError,
    UnsupportedOperationError,
    UsageError,
)
from spark_elastic.tensorflow.errors import marked
from spark_elastic.tensorflow.tensors import Array, array_of


class RefusedError(UsageError, FailedPreconditionError, InvalidArgumentError):  # type: ignore[misc]
    """A collective was called in a way that does not work; with the types that Horovod's operations raise."""

    message = ""  # TensorFlow has a property of that name

    def __init__(self, message: str) -> None:
        tf.errors.OpError.__init__(self, None, None, message, tf.errors.FAILED_PRECONDITION)
        self.message = message
        self._fields: dict[str, object] = {}
        self.args = (message,)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.message,)


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

    Raises:
        HorovodInternalError: a peer is gone. In a graph it arrives as one of TensorFlow's errors.
        UsageError: the call does not work; it is one of TensorFlow's errors as well.
    """
    if tf.executing_eagerly():
        try:
            returned = function(*(array_of(tensor) for tensor in inputs))
        except (NotInitializedError, OutsideLoopError, UnsupportedOperationError):
            raise
        except UsageError as error:
            raise RefusedError(str(error)) from error
        return [tf.constant(result) for result in returned]  # copied: it may be memory that is used again

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
