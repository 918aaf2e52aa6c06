"""Keras variables: their values copied, put back and sent, with the least that the backend needs for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.keras.backend import BACKEND

Variable = Any
"""keras.Variable, or tf.Variable."""
Copy = Any
"""The value of a variable at some moment, as a tensor of the backend."""


class Description(NamedTuple):
    """A variable by its path in its model, shape and type."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.path} {self.shape} {self.dtype}"


def describe(variable: Variable) -> Description:
    path = getattr(variable, "path", None) or variable.name
    dtype = getattr(variable.dtype, "name", variable.dtype)  # TensorFlow's types are objects, Keras' are names
    return Description(str(path), tuple(int(n) for n in variable.shape), str(dtype))


def _native(variable: Variable) -> Any:
    """The backend's own variable or parameter; TensorFlow's have a method of that name."""
    value = variable.value
    return variable if callable(value) else value


def has_value(variable: Variable) -> bool:
    """Whether the variable has been initialised: one that a `tf.function` makes is only when that runs."""
    if BACKEND == "torch":
        return True
    with outside_of_graphs():
        return bool(_native(variable).is_initialized())


def outside_of_graphs() -> AbstractContextManager[Any]:
    """Within it operations are done at once, also where a `tf.function` is traced."""
    if BACKEND == "torch":
        return nullcontext()
    import tensorflow as tf

    context: AbstractContextManager[Any] = tf.init_scope()
    return context


def bytes_of(description: Description) -> int:
    """How many bytes the values of such a variable are."""
    return int(np.prod(description.shape, dtype=np.int64)) * _numpy_type(description.dtype).itemsize


def _numpy_type(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and the small floats, which numpy itself does not know
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def to_wire(variable: Variable) -> torch.Tensor:
    """The bytes of a variable's values: uint8, shape (n,)."""
    if BACKEND == "torch":
        value = variable.value.detach().cpu().contiguous()
        return value.reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
    array = np.ascontiguousarray(variable.numpy())
    return torch.from_numpy(array.reshape(-1).view(np.uint8).copy() if not array.flags.writeable else _flat(array))


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def from_wire(variable: Variable, wire: torch.Tensor) -> None:
    """Give a variable the values that `to_wire` made these bytes of."""
    description = describe(variable)
    if BACKEND == "torch":
        with torch.no_grad():
            value = variable.value
            if value.numel():
                value.copy_(wire.view(value.dtype).view(value.shape))
        return
    array = wire.numpy().view(_numpy_type(description.dtype)).reshape(description.shape)
    _native(variable).assign(array)


# --- copies within the process --------------------------------------------------------------------


def copies_of(variables: Sequence[Variable]) -> list[Copy]:
    """The present values. With TensorFlow nothing is copied until the variable is next changed."""
    if BACKEND == "torch":
        with torch.no_grad():
            return [variable.value.detach().clone() for variable in variables]
    return [_native(variable).read_value() for variable in variables]


def put_back(variables: Sequence[Variable], copies: Sequence[Copy]) -> None:
    """Give the variables the values of `copies`, which stay as they are."""
    if BACKEND == "torch":
        if variables:
            with torch.no_grad():
                torch._foreach_copy_([variable.value.detach() for variable in variables], list(copies))
        return
    for variable, copy in zip(variables, copies, strict=True):
        _native(variable).assign(copy)


def reader_of(variables: Sequence[Variable]) -> Callable[[], list[Copy]]:
    """`copies_of` these variables, made for being called often: one call into TensorFlow for all of them."""
    variables = list(variables)
    if BACKEND == "torch" or len(variables) < _WORTH_A_GRAPH:
        return lambda: copies_of(variables)
    import tensorflow as tf

    # ReadVariableOp shares the variable's buffer; whoever changes the variable next copies it first
    graph = tf.function(lambda: [_native(variable).read_value() for variable in variables], autograph=False)
    return lambda: list(graph())


def rows_of(data: Any) -> Any:
    """Rows of a batch as `train_step` gets it: a number, or a tensor of type float64 in a graph."""
    import keras

    inputs = data[0] if isinstance(data, tuple) else data
    first = next(part for part in keras.tree.flatten(inputs) if part is not None)
    if BACKEND == "torch":
        return float(first.shape[0])
    import tensorflow as tf

    return tf.cast(tf.shape(first)[0], tf.float64)


_WORTH_A_GRAPH = 16


# Keras numbers layers and optimizers as they are made: "adam_3/dense_65_kernel_momentum" in one process or notebook
# cell is "adam/dense_kernel_momentum" in another.
_AUTOMATIC_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def same_place(one: str, other: str) -> bool:
    """Whether two paths can be those of one variable, in processes that have numbered their layers on their own."""
    return _AUTOMATIC_NUMBER.sub("", one) == _AUTOMATIC_NUMBER.sub("", other)
