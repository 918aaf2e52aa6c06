"""The names that are the same for every framework; each of the packages that users import exports them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spark_elastic.collective.objects import allgather_object, broadcast_object
from spark_elastic.collective.operations import barrier, join
from spark_elastic.collective.operators import Adasum, Average, Max, Min, Product, ReduceOp, Sum
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
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, NotInitializedError, OutsideLoopError

# --- functions by which programs ask Horovod for the features of its build ---------------------------------


def _no(*_: Any, **__: Any) -> bool:
    """Return False: spark_elastic does not have this."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Return True: collectives run over torch's Gloo."""
    return True


gloo_enabled = gloo_built
mpi_threads_supported = mpi_enabled = mpi_built = _no
"""Return False: there is no MPI here."""
ddl_built = ccl_built = _no
"""Return False: collectives run over torch's Gloo, and over NCCL between GPUs."""


def nccl_built(verbose: bool = False) -> bool:
    """Return True if torch has NCCL, which reduces gradients on GPUs."""
    return bool(dist.is_available() and dist.is_nccl_available())


def cuda_built(verbose: bool = False) -> bool:
    """Return True if torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Return True if torch is built for ROCm."""
    return getattr(torch.version, "hip", None) is not None


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
