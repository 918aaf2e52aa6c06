"""Collectives on values, arrays and tensors of the Keras backend."""

from __future__ import annotations

from typing import Any

import keras

from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, Compression, ReduceOp
from spark_elastic.errors import UnsupportedOperationError
from spark_elastic.keras.backend import BACKEND

if BACKEND == "tensorflow":
    from spark_elastic.tensorflow import operations as _operations
else:
    from spark_elastic.torch import autograd as _operations  # type: ignore[no-redef]


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
    """Average (or reduce with `op`) the members' values; return a tensor of the backend.

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
    """Average (or sum) the members' values; return this member's rows, as a tensor of the backend.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    return _operations.reducescatter(keras.ops.convert_to_tensor(value), op=op, process_set=process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error, because Keras 3 keeps no list of all variables.

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        "broadcast_global_variables needs the global variables of TensorFlow 1, which Keras 3 does not have; add "
        "BroadcastGlobalVariablesCallback(0) to the callbacks of model.fit"
    )
