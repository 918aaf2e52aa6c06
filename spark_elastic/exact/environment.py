"""What the bits of a result depend on besides the program and its data, compared between workers and with a resume."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from spark_elastic.collective.objects import allgather_object

log = logging.getLogger("spark_elastic.torch")


class EnvironmentCheck:
    """Warns, once for each difference, where the bits of a result may differ because environments do."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._warned: set[str] = set()

    def compare_members(self) -> None:
        """Compare the environments of all members; a collective."""
        everyone = allgather_object(self.environment)
        for rank, other in enumerate(everyone):
            if self._is_new(different := differences(everyone[0], other, was="there it is")):
                log.warning(
                    "the result may depend on which worker computes which shard: rank %d differs from rank 0: %s. Use "
                    "machines and versions that are alike",
                    rank,
                    different,
                )

    def compare(self, then: Mapping[str, str]) -> None:
        """Compare with the environment in which the training was begun."""
        if self._is_new(different := differences(then, self.environment)):
            log.warning(
                "from here on, the result may differ in some bits from that of an uninterrupted training: %s", different
            )

    def _is_new(self, different: str) -> bool:
        new = bool(different) and different not in self._warned
        self._warned.add(different)
        return new


_VARIABLES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA")


def environment(threads: int) -> dict[str, str]:
    """Return what the bits of a computation depend on besides the program and its data."""
    return {
        "torch": str(torch.__version__),  # of a type that torch.load(weights_only=True) accepts
        "numpy": np.__version__,
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "threads": str(threads),
        "MKL": str(torch.backends.mkl.is_available()),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "matmul precision": torch.get_float32_matmul_precision(),
        "subnormal numbers": "kept" if float(torch.tensor(1e-310, dtype=torch.float64) + 0.0) else "flushed to zero",
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def processor() -> str:
    """Return the name of this host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def differences(then: Mapping[str, str], now: Mapping[str, str], was: str = "was") -> str:
    """Return in words what differs between two environments, with `was` before the first one's; "" if nothing does."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return ", ".join(f"{name} is {now.get(name, 'not set')}, and {was} {then.get(name, 'not set')}" for name in names)
