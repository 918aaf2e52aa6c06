"""The names that are the same for every framework: each of the packages that users import passes them on."""

from __future__ import annotations

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
from spark_elastic.collective.process_sets import (
    ProcessSet,
    add_process_set,
    cross_process_set,
    global_process_set,
    local_process_set,
    remove_process_set,
)
from spark_elastic.collective.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, NotInitializedError, OutsideLoopError

__all__ = [
    "Adasum",
    "Average",
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
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "cross_process_set",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_process_set",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]
