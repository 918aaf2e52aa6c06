"""Functions for Keras besides optimizer and callbacks: collectives on values, `load_model`, and names of Keras 2."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from spark_elastic.collective.operators import Average, Compression, ReduceOp
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UnsupportedOperationError
from spark_elastic.keras.archives import check_saved
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.optimizer import DistributedOptimizer

if BACKEND == "tensorflow":
    from spark_elastic.tensorflow import operations as _operations
else:
    from spark_elastic.torch import operations as _operations  # type: ignore[no-redef]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the average (or `op`) of the members' values, as a tensor of the backend.

    Args:
        value: a number, an array or a tensor.
        name: has no effect; for compatibility with Horovod.
        average: Horovod's older form of `op`: True: Average, False: Sum.
        prescale_factor: factor of the values before the reduction.
        postscale_factor: factor of the result.
        op: the operator; default Average.
        compression: the compressor of the sent values.
        process_set: the processes to reduce over.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    return _operations.allreduce(
        keras.ops.convert_to_tensor(value),
        average=average,
        op=op,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the members' values along the first dimension, in rank order; return a tensor of the backend.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    return _operations.allgather(keras.ops.convert_to_tensor(value), process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the value of `root_rank`, as a tensor of the backend.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    return _operations.broadcast(keras.ops.convert_to_tensor(value), root_rank, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Average (or sum) the members' values, and return this member's rows, as a tensor of the backend.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    return _operations.reducescatter(keras.ops.convert_to_tensor(value), op=op, process_set=process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UnsupportedOperationError, because Keras 3 keeps no list of all variables."""
    raise UnsupportedOperationError(
        "broadcast_global_variables needs the global variables of TensorFlow 1, which Keras 3 does not have; add "
        "BroadcastGlobalVariablesCallback(0) to the callbacks of model.fit"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    **distributed: Any,
) -> Any:
    """Load a model with `keras.saving.load_model` and make its optimizer a `DistributedOptimizer`, with its state.

    Args:
        filepath: a file that `model.save` wrote, with any optimizer, distributed or not.
        custom_optimizers: the classes of optimizers that do not belong to Keras.
        custom_objects: other classes and functions that the model needs, by name.
        compression: argument of `DistributedOptimizer`.
        **distributed: further arguments of `DistributedOptimizer`.

    Raises:
        CheckpointError: the file is damaged, or would get other files of this machine into the model.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known.update(custom_objects or {})
    check_saved(filepath, known)
    model = keras.saving.load_model(filepath, custom_objects=known or None)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **distributed)
    return model


# --- names of Keras 2 -------------------------------------------------------------------------------

_ARGUMENT = "experimental_run_tf_function"


def accept_keras2_names() -> None:
    """Make `model.compile` accept `experimental_run_tf_function`, and optimizers `lr`, each with a warning."""
    # Replace `compile` in the class that defines it. Keras takes a `compile` of a subclass for the user's and does not
    # call it when a model is loaded.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    plain = owner.compile
    if hasattr(plain, "accepts_keras2_names"):
        return

    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ARGUMENT in kwargs:
            del kwargs[_ARGUMENT]
            warnings.warn(
                "compile(experimental_run_tf_function=...) has no effect: Keras 3 has no such argument; remove it",
                UserWarning,
                stacklevel=2,
            )
        return plain(self, *args, **kwargs)

    compile.accepts_keras2_names = True  # type: ignore[attr-defined]
    owner.compile = compile
    if not hasattr(keras.optimizers.Optimizer, "lr"):
        keras.optimizers.Optimizer.lr = property(_rate, _set_rate)


def _rate(optimizer: Any) -> Any:
    """Return the backend's variable, as Keras 2 did: `keras.backend.set_value` accepts no other."""
    _warn_of_lr()
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    return rate.value if isinstance(rate, keras.Variable) else rate


def _set_rate(optimizer: Any, value: Any) -> None:
    _warn_of_lr()
    optimizer.learning_rate = value


def _warn_of_lr() -> None:
    warnings.warn(
        "optimizer.lr is learning_rate in Keras 3; lr is accepted for programs that were written for Horovod",
        UserWarning,
        stacklevel=3,
    )
