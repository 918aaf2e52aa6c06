"""How many threads a worker may use, when it shares a host with others."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def host_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may run on: those of its affinity, or of its container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no container, or an older kernel's
        pass
    return cores


def threads_for(asked: int | None, cores: int, workers: int) -> int:
    """What was asked for, or an equal share of the host's cores, at least one."""
    return asked or max(1, cores // workers)
