"""Calls from a TensorFlow program to this process's Python, eagerly or from inside of a `tf.function`."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from spark_elastic.tensorflow.tensors import Array, array_of

# A lost peer on its way through TensorFlow, which makes an error of its own of every exception in a host callback.

_KEPT = 8
_numbers = itertools.count(1)
_recorded: deque[tuple[int, HorovodInternalError]] = deque(maxlen=_KEPT)
_TOKEN = re.compile(r"\[lost peer (\d+)\]")
_FOLLOWING = (tf.errors.CancelledError, tf.errors.AbortedError)
"""What other parts of a graph end with when one has failed; TensorFlow may raise theirs first."""


def marked(error: HorovodInternalError) -> HorovodInternalError:
    """What a host callback raises for it, so that `lost_peer` knows it again."""
    number = next(_numbers)
    _recorded.append((number, error))
    return HorovodInternalError(f"{error} [lost peer {number}]")


def lost_peer(error: BaseException) -> HorovodInternalError | None:
    """The error of the collective that this one came of, if it came of a lost peer; None otherwise."""
    if isinstance(error, HorovodInternalError) and not _TOKEN.search(str(error)):
        return error
    for each in _chain(error):
        if found := _TOKEN.search(str(each)):
            return _take(int(found[1])) or HorovodInternalError(_first_line(each))
    if isinstance(error, _FOLLOWING) and _recorded:
        return _take(_recorded[-1][0])
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Within it a lost peer is the same HorovodInternalError as in torch; every other error is itself."""
    try:
        yield
    except Exception as error:
        original = lost_peer(error)
        if original is None or original is error:
            raise
        raise original from error


def _take(number: int) -> HorovodInternalError | None:
    """Forget it, and those before it: each belongs to a world that is over."""
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
        error = error.__cause__  # type: ignore[assignment]  # not __context__: what is raised meanwhile is news


def _first_line(error: BaseException) -> str:
    return next(iter(line for line in str(error).splitlines() if _TOKEN.search(line)), str(error))


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
