"""What a task says of the slot that it occupies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotReport:
    """`addresses`: IPv4 addresses by interface name, loopback included."""

    host: str
    """The machine, by the address its peers reach it at."""
    executor: str
    """Spark's executor id; "driver" in local mode."""
    addresses: dict[str, str]
    cores: int
    """Cores that Spark gave to the task (spark.task.cpus)."""
    accelerators: tuple[str, ...]
    """Addresses of the GPUs that Spark gave to the task."""
    python: str
