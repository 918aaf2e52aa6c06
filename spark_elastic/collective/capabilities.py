"""What Horovod builds can be asked about themselves; the answers of this one."""

from __future__ import annotations

from typing import Any


def _no(*_: Any, **__: Any) -> bool:
    """This is not part of spark_elastic."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Collectives run over torch's Gloo."""
    return True


def gloo_enabled() -> bool:
    """Collectives run over torch's Gloo."""
    return True


mpi_threads_supported = mpi_enabled = mpi_built = _no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _no
