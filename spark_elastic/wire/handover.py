"""What travels with a slot's launch into the Spark task, and what comes back as the task's result.

Both go through Spark's own serialisation (or the local launcher's pipe), never through our sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_elastic.core.topology import SlotId, WorkerId


@dataclass(frozen=True)
class AgentOrder:
    """Everything an agent needs. The same for each slot of a job."""

    job: str
    """The job's name in logs and descriptions."""
    driver_addresses: tuple[tuple[str, int], ...]
    """Where the driver's rendezvous server listens; tried in this order."""
    key: bytes = field(repr=False)
    """The job's key for the channels."""
    function: bytes = field(repr=False)
    """cloudpickle of (fn, args, kwargs)."""
    connect_timeout_s: float
    env: dict[str, str] = field(default_factory=dict)
    """Added to the worker's environment."""
    nics: tuple[str, ...] | None = None
    """Network interfaces that may carry collectives; None: any."""
    preimport: tuple[str, ...] = ("torch",)
    """Modules that a worker imports while it waits."""


@dataclass(frozen=True)
class AgentOutcome:
    """What an agent returns: the finished worker and its pickled result, or why there is none."""

    slot: SlotId
    worker: WorkerId | None
    result: bytes | None
    why: str
