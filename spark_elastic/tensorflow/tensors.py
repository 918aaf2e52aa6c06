"""Convert TensorFlow tensors to torch tensors and back, without a copy where both can read the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch

from spark_elastic.errors import UsageError

Array = npt.NDArray[Any]

ALIGN_BYTES = 64
"""TensorFlow uses memory that begins at a multiple of this without a copy."""
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
    """Return the memory as a writeable array, because torch warns of read-only ones; callers here only read it."""
    return np.asarray(_WriteableView(array)) if array.size else array.copy()


class _WriteableView:
    """The memory of an array by its address; keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def array_from(tensor: torch.Tensor) -> Array:
    """Return a numpy array with the memory of a tensor, in a type that TensorFlow reads."""
    for dtype, (_, kind) in _AS_INTEGERS.items():
        if tensor.dtype is kind:
            return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()
