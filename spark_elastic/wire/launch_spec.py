"""What travels with a slot's launch: through Spark's own serialisation or a launcher's pipe, never our sockets."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field

import cloudpickle


@dataclass(frozen=True)
class LaunchSpec:
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
    made_by: str
    """Python and cloudpickle of the driver, for the error if a worker's cannot load the function."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the worker's environment."""
    device: str = "auto"
    """What the workers compute on: "auto", "cpu", "cuda" or "cuda:N"."""
    nics: tuple[str, ...] | None = None
    """Network interfaces that may carry collectives; None: any."""
    preimport: tuple[str, ...] = ("torch", "torch._dynamo")
    """Modules that a worker imports while it waits, see `modules_of`."""


def modules_of(function: bytes) -> tuple[str, ...]:
    """The modules that a pickled function will import first, by the names in it: seconds that overlap with the wait.

    What they are wrong about costs time and nothing else.
    """
    if b"tensorflow" in function:
        return ("torch", "tensorflow", "keras", "spark_elastic.tensorflow")
    if b"keras" in function:  # imports the backend that KERAS_BACKEND names
        return ("torch", "keras", "spark_elastic.collective.operations")
    return ("torch", "torch._dynamo")  # the first optimizer in a process imports the second: another two seconds


def interpreter() -> str:
    """This process's Python and cloudpickle, in words."""
    return f"Python {platform.python_version()} ({sys.executable}) with cloudpickle {cloudpickle.__version__}"
