"""TensorFlow's tensors as torch's and back: the same memory, wherever both can read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import torch

from spark_elastic.errors import UsageError

Array = npt.NDArray[Any]

ALIGN_BYTES = 64
"""Memory that begins at a multiple of this is taken by TensorFlow as it is; other memory it copies."""
_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_AS_INTEGERS: dict[Any, tuple[Any, torch.dtype]] = {
    np.dtype(_BFLOAT16): (np.int16, torch.bfloat16),
}
"""Types that numpy knows by name only: the integers that their bytes are, and torch's type of them."""


def array_of(tensor: Any) -> Array:
    """The values of an eager tensor or a variable, without a copy if it lies in the host's memory; not to be changed.

    Raises: UsageError: it is not an eager tensor.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, tf.Variable):
        tensor = tensor.read_value()
    if not hasattr(tensor, "numpy"):
        raise UsageError(f"this needs an eager tensor, not {tensor!r}: call it outside of tf.function")
    try:
        return np.asarray(memoryview(tensor)).reshape(tensor.shape)
    except (TypeError, ValueError, RuntimeError):  # another device, or a type that the buffer protocol does not have
        return np.asarray(tensor.numpy())


def torch_of(array: Array) -> torch.Tensor:
    """The same memory as a torch tensor. Raises: UsageError: torch has no such type."""
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
    """The same memory without numpy's guard, of which torch would warn. What it is handed to here only reads."""
    return np.asarray(_Unguarded(array)) if array.size else array.copy()


class _Unguarded:
    """Memory of an array by its address; keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def array_from(tensor: torch.Tensor) -> Array:
    """The same memory as a numpy array that TensorFlow understands."""
    for dtype, (_, kind) in _AS_INTEGERS.items():
        if tensor.dtype is kind:
            return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()
