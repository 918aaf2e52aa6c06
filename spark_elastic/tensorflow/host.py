"""Call Python of this process from TensorFlow, eagerly or inside a `tf.function`, with tensors, results and errors.

Tensors of TensorFlow, arrays of numpy and tensors of torch share their memory where they can.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch
from tensorflow.errors import FailedPreconditionError, InvalidArgumentError

from spark_elastic.collective.operators import CastCompressor, Compressor, NoneCompressor
from spark_elastic.errors import (
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    OutsideLoopError,
    UnsupportedOperationError,
    UsageError,
)

Array = npt.NDArray[Any]

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_AS_INTEGERS: dict[Any, tuple[Any, torch.dtype]] = {
    np.dtype(_BFLOAT16): (np.int16, torch.bfloat16),
}
"""numpy types that torch cannot read: for each, an integer type of the same size, and torch's type."""


def array_of(tensor: Any) -> Array:
    """Return the read-only values of an eager tensor or a variable, without a copy if it is in host memory.

    Raises:
        UsageError: it is not an eager tensor.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, tf.Variable):
        tensor = tensor.read_value()
    if not hasattr(tensor, "numpy"):
        raise UsageError(f"expected an eager tensor, got {tensor!r}; call this outside of tf.function")
    try:
        return np.asarray(memoryview(tensor)).reshape(tensor.shape)
    except (TypeError, ValueError, RuntimeError):  # on another device, or of a type without the buffer protocol
        return np.asarray(tensor.numpy())


def native(variable: Any) -> Any:
    """Return the tf.Variable behind a Keras variable; another object is returned itself."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value  # `value` is a method of tf.Variable


def torch_of(array: Array) -> torch.Tensor:
    """Return a torch tensor with the memory of an array.

    Raises:
        UsageError: torch has no such type.
    """
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if not array.flags.writeable:
        array = _writeable(array)
    try:
        if array.dtype in _AS_INTEGERS:
            integers, dtype = _AS_INTEGERS[array.dtype]
            return torch.from_numpy(array.view(integers)).view(dtype)
        return torch.from_numpy(array)
    except TypeError:
        kind = "string" if array.dtype == object else array.dtype
        raise UsageError(f"tensors of type {kind} cannot be sent; cast them to a number type first") from None


def _writeable(array: Array) -> Array:
    """Return an array with the same memory that counts as writeable: torch warns of others, though it only reads it."""
    return np.asarray(_WriteableView(array)) if array.size else array.copy()


class _WriteableView:
    """An object whose `__array_interface__` is the memory of an array; it keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def array_from(tensor: torch.Tensor) -> Array:
    """Return a numpy array with the memory of a tensor, in a type that TensorFlow reads."""
    for dtype, (_, kind) in _AS_INTEGERS.items():
        if tensor.dtype is kind:
            return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


# --- compression ------------------------------------------------------------------------------------

# Casts run on the host, on the memory that is sent, and need no copy in the graph. Users' compressors run in the graph.


def graph_compressor(compression: type[Compressor]) -> type[Compressor]:
    """Return the compressor to apply to TensorFlow's tensors in the graph."""
    return NoneCompressor if issubclass(compression, CastCompressor) else compression


def host_compressor(compression: type[Compressor]) -> type[Compressor]:
    """Return the compressor to apply on the host, to torch tensors."""
    return compression if issubclass(compression, CastCompressor) else NoneCompressor


# --- calls ------------------------------------------------------------------------------------------


class RefusedError(UsageError, FailedPreconditionError, InvalidArgumentError):  # type: ignore[misc]
    """A collective was called with invalid arguments; derived from the errors that Horovod's operations raise, too."""

    message = ""  # hides TensorFlow's property of this name

    def __init__(self, message: str) -> None:
        tf.errors.OpError.__init__(self, None, None, message, tf.errors.FAILED_PRECONDITION)
        self.message = message
        self._fields: dict[str, object] = {}
        self.args = (message,)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.message,)


class RefusedMismatchError(RefusedError, MismatchError):
    """A `MismatchError` that is one of TensorFlow's errors, too."""


def call_host(
    function: Callable[..., Sequence[Array]],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Any],
) -> list[tf.Tensor]:
    """Call `function` with the values of `inputs` and return its results as tensors.

    In a graph, the arrays that `function` receives are TensorFlow's own memory. TensorFlow uses returned arrays without
    a copy if they begin at a multiple of 64 bytes. The calls of one graph run one after the other, in program
    order. In a function that XLA compiles, TensorFlow raises an error.

    Args:
        function: a function of numpy arrays that returns numpy arrays.
        inputs: its arguments.
        dtypes: types of the results.
        shapes: static shapes of the results.

    Raises:
        HorovodInternalError: a peer is gone. In a graph, TensorFlow raises an error of its own class instead, see
            `lost_peers_translated`; so it does for a MismatchError.
        UsageError: the arguments are invalid; in eager mode a `RefusedError`.
    """
    if tf.executing_eagerly():
        try:
            returned = function(*(array_of(tensor) for tensor in inputs))
        except (NotInitializedError, OutsideLoopError, UnsupportedOperationError):
            raise
        except UsageError as error:
            kind = RefusedMismatchError if isinstance(error, MismatchError) else RefusedError
            raise kind(str(error)) from error
        return [tf.constant(result) for result in returned]  # copied, because the memory may be reused

    def guarded(*arrays: Array) -> Sequence[Array]:
        try:
            return function(*arrays)
        except (HorovodInternalError, MismatchError) as error:
            raise with_token(error) from error

    returned = tf.numpy_function(guarded, list(inputs), list(dtypes))
    results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def call_with_gradient(
    function: Callable[..., Sequence[Array]], sent: tf.Tensor, shape: Any, gradient: Callable[..., Any]
) -> tf.Tensor:
    """Call `function` with the value of `sent` and return its one result as a tensor that has this gradient.

    Args:
        function: a function of a numpy array that returns a list of one array of the same type.
        sent: its argument.
        shape: the static shape of the result.
        gradient: a function that returns the gradient for `sent` from that of the result.
    """

    @tf.custom_gradient
    def call(sent: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        return call_host(function, [sent], [sent.dtype], [shape])[0], gradient

    return call(sent)


# --- lost peers, through TensorFlow ---------------------------------------------------------------

# TensorFlow converts an exception of a host callback to an error of its own class that keeps only the message. So the
# callback records its HorovodInternalError or MismatchError under a number and writes that number into the message;
# that is the token.

_MAX_RECORDED = 8
_numbers = itertools.count(1)
_Recorded = HorovodInternalError | MismatchError
_recorded: deque[tuple[int, _Recorded]] = deque(maxlen=_MAX_RECORDED)
_TOKEN = re.compile(r"\[(?:lost peer|mismatch) (\d+)\]")
_CONSEQUENCES = (tf.errors.CancelledError, tf.errors.AbortedError)
"""Errors of the other parts of a graph after one part failed; TensorFlow may raise these first."""


def with_token(error: _Recorded) -> _Recorded:
    """Record an error and return one whose message has a token, by which `original_error` finds the recorded one."""
    number = next(_numbers)
    _recorded.append((number, error))
    if isinstance(error, MismatchError):
        return MismatchError(f"{error} [mismatch {number}]")
    return HorovodInternalError(f"{error} [lost peer {number}]")


def original_error(error: BaseException) -> _Recorded | None:
    """Return the error of a collective that caused an error; None if the error has another cause."""
    if isinstance(error, HorovodInternalError) and not _TOKEN.search(str(error)):
        return error
    for each in _chain(error):
        if found := _TOKEN.search(str(each)):
            return _take(int(found[1])) or HorovodInternalError(_first_line(each))
    if isinstance(error, _CONSEQUENCES) and _recorded:
        return _take(_recorded[-1][0])
    return None


@contextmanager
def lost_peers_translated() -> Iterator[None]:
    """Raise the original error of a collective in place of TensorFlow's error for it; let other errors pass."""
    try:
        yield
    except Exception as error:
        original = original_error(error)
        if original is None or original is error:
            raise
        raise original from error


def _take(number: int) -> _Recorded | None:
    """Return the error of this number; forget it and all earlier ones."""
    found = dict(_recorded).get(number)
    later = [entry for entry in _recorded if entry[0] > number]
    _recorded.clear()
    _recorded.extend(later)
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # not __context__: an error raised while another is handled is a separate one
        error = error.__cause__  # type: ignore[assignment]


def _first_line(error: BaseException) -> str:
    return next(iter(line for line in str(error).splitlines() if _TOKEN.search(line)), str(error))
