"""The backend of Keras in this process: check it before Keras is imported, then copy and send the values of variables.

Each function here does its work at the lowest cost that the backend, TensorFlow or torch, allows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from spark_elastic.errors import MissingExtraError, UsageError

SUPPORTED = ("tensorflow", "torch")


def _checked() -> str:
    try:
        import keras
    except ImportError as error:
        package = (error.name or "keras").partition(".")[0]
        if package not in ("keras", *SUPPORTED):  # that of the backend, which Keras imports
            raise _unsupported(os.environ.get("KERAS_BACKEND") or package) from error
        raise MissingExtraError(what="spark_elastic.keras", package=package, extra="tensorflow") from error
    backend = str(keras.backend.backend())
    if backend not in SUPPORTED:
        raise _unsupported(backend)
    return backend


def _unsupported(backend: str) -> UsageError:
    return UsageError(
        f"Keras is set to the {backend} backend in this process, but spark_elastic.keras supports only TensorFlow and "
        "PyTorch; set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
    )


BACKEND = _checked()
"""The backend of Keras in this process: "tensorflow" or "torch"."""


Variable = Any
"""A keras.Variable or tf.Variable."""
Copy = Any
"""A copy of a variable's value, as a tensor of the backend."""


class Description(NamedTuple):
    """Path, shape and type of a variable."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def describe(variable: Variable) -> Description:
    path = getattr(variable, "path", None) or variable.name
    dtype = getattr(variable.dtype, "name", variable.dtype)  # types are objects in TensorFlow, names in Keras
    return Description(str(path), tuple(int(n) for n in variable.shape), str(dtype))


def native(variable: Variable) -> Any:
    """Return the backend's variable or parameter behind a Keras variable; another object is returned itself."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value  # `value` is a method of tf.Variable


def has_value(variable: Variable) -> bool:
    """Return True if the variable is initialised; a variable created in a `tf.function` is not until that runs."""
    if BACKEND == "torch":
        return True
    with outside_of_graphs():
        return bool(native(variable).is_initialized())


def outside_of_graphs() -> AbstractContextManager[Any]:
    """Return a context in which operations run immediately, even while a `tf.function` is traced."""
    if BACKEND == "torch":
        return nullcontext()
    import tensorflow as tf

    context: AbstractContextManager[Any] = tf.init_scope()
    return context


def after(grads: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context whose operations, in a graph, wait for these gradients, of which some may be None."""
    if BACKEND == "torch":
        return nullcontext()
    import tensorflow as tf

    present = tf.nest.flatten([grad for grad in grads if grad is not None], expand_composites=True)
    context: AbstractContextManager[Any] = tf.control_dependencies(present)
    return context


def numpy_type(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and the 8-bit floats, which numpy does not have
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def to_wire(variable: Variable) -> torch.Tensor:
    """Return the bytes of a variable's values: uint8, shape (n,)."""
    if BACKEND == "torch":
        value = variable.value.detach().cpu().contiguous()
        return value.reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
    array = np.ascontiguousarray(variable.numpy())
    flat = array.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if array.flags.writeable else flat.copy())


def from_wire(variable: Variable, wire: torch.Tensor) -> None:
    """Set a variable to the values whose bytes `to_wire` returned."""
    if BACKEND == "torch":
        with torch.no_grad():
            value = variable.value
            if value.numel():
                value.copy_(wire.view(value.dtype).view(value.shape))
        return
    description = describe(variable)
    array = wire.numpy().view(numpy_type(description.dtype)).reshape(description.shape)
    native(variable).assign(array)


# --- copies within the process --------------------------------------------------------------------


def copy_values(variables: Sequence[Variable]) -> list[Copy]:
    """Return copies of the present values. TensorFlow copies the memory only when the variable is changed next."""
    if BACKEND == "torch":
        with torch.no_grad():
            return [variable.value.detach().clone() for variable in variables]
    return [native(variable).read_value() for variable in variables]


def restore_values(variables: Sequence[Variable], copies: Sequence[Copy]) -> None:
    """Set the variables to the values of `copies`, which are not changed."""
    if BACKEND == "torch":
        if variables:
            with torch.no_grad():
                torch._foreach_copy_([variable.value.detach() for variable in variables], list(copies))
        return
    for variable, copy in zip(variables, copies, strict=True):
        native(variable).assign(copy)


class Copies:
    """Copies of the values of variables, to which they can return."""

    def __init__(self, variables: Iterable[Variable] = ()) -> None:
        self.variables = list(variables)
        self._values = copy_values(self.variables)

    def add(self, variables: Iterable[Variable]) -> None:
        """Copy also those of these variables that are new and have a value."""
        known = set(map(id, self.variables))
        new = [each for each in variables if id(each) not in known and has_value(each)]
        with outside_of_graphs():
            self._values = self._values + copy_values(new)
        self.variables = self.variables + new

    def restore(self) -> None:
        restore_values(self.variables, self._values)


def rows_of(data: Any) -> Any:
    """Return the number of rows in the argument `data` of `train_step`; on TensorFlow, a float64 tensor."""
    import keras

    inputs = data[0] if isinstance(data, tuple) else data
    first = next(part for part in keras.tree.flatten(inputs) if part is not None)
    if BACKEND == "torch":
        return float(first.shape[0])
    import tensorflow as tf

    return tf.cast(tf.shape(first)[0], tf.float64)


# Keras numbers layers and optimizers in order of creation: "adam_3/dense_65_kernel_momentum" in one process or notebook
# cell is "adam/dense_kernel_momentum" in another.
_AUTOMATIC_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def same_path(one: str, other: str) -> bool:
    """Return True if two variables' paths are equal except for numbers that Keras added to names."""
    return _AUTOMATIC_NUMBER.sub("", one) == _AUTOMATIC_NUMBER.sub("", other)
