"""Data-parallel TensorFlow with the names that Horovod users know: ``import spark_elastic.tensorflow as hvd``."""

from __future__ import annotations

from typing import Any

from spark_elastic.collective.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from spark_elastic.collective.objects import allgather_object, broadcast_object
from spark_elastic.collective.operations import barrier, join
from spark_elastic.collective.process import (
    NotInitializedError,
    OutsideLoopError,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from spark_elastic.collective.process_sets import ProcessSet, cross_process_set, global_process_set, local_process_set
from spark_elastic.collective.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, MissingExtraError

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise MissingExtraError(what="spark_elastic.tensorflow", package="tensorflow", extra="tensorflow") from error

from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    rank_op,
    reducescatter,
    size_op,
)
from spark_elastic.tensorflow.tape import DistributedGradientTape
from spark_elastic.tensorflow.variables import broadcast_variables

# Of the floor above, which itself stands on this package: resolved on first use.
_ABOVE = {
    "DistributedOptimizer": ("spark_elastic.keras.optimizer", "DistributedOptimizer"),
    "elastic": ("spark_elastic.tensorflow.elastic", None),
    "keras": ("spark_elastic.tensorflow.keras", None),
}


def __getattr__(name: str) -> Any:
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _ABOVE[name]
    value = importlib.import_module(module)
    globals()[name] = value = value if attribute is None else getattr(value, attribute)
    return value


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "NotInitializedError",
    "OutsideLoopError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "ccl_built",
    "cross_process_set",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",
    "local_process_set",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
]
