"""What Horovod builds can be asked about themselves; the answers of this one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
ddl_built = ccl_built = _no


def nccl_built(verbose: bool = False) -> bool:
    """Gradients on GPUs can be reduced by NCCL."""
    return bool(dist.is_available() and dist.is_nccl_available())


def cuda_built(verbose: bool = False) -> bool:
    """Torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Torch is built for ROCm."""
    return getattr(torch.version, "hip", None) is not None
