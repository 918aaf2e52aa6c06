"""The specification that a launched agent gets, through Spark's own serialisation or a launcher's pipe.

It holds the job's key, so it must not travel over an unauthenticated socket or in a file.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field

import cloudpickle


@dataclass(frozen=True)
class LaunchSpec:
    """Everything an agent needs; the same for each slot of a job."""

    job: str
    """The job's name in logs and descriptions."""
    driver_addresses: tuple[tuple[str, int], ...]
    """Addresses of the driver's rendezvous server, in the order in which to try them."""
    key: bytes = field(repr=False)
    """The job's key for the channels."""
    function: bytes = field(repr=False)
    """cloudpickle of (fn, args, kwargs)."""
    connect_timeout_s: float
    made_by: str
    """`interpreter()` of the driver, for the error of a worker that cannot load the function."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables to add to the worker's environment."""
    device: str = "auto"
    """Device of the workers: "auto", "cpu", "cuda" or "cuda:N"."""
    nics: tuple[str, ...] | None = None
    """Network interfaces that may carry collectives; None for any."""
    preimport: tuple[str, ...] = ("torch", "torch._dynamo")
    """Modules that a worker imports while it waits for its order, see `modules_of`."""


def modules_of(function: bytes) -> tuple[str, ...]:
    """Guess from the names in a pickled function which slow modules it imports, so that workers import them early.

    A wrong guess costs time and nothing else.
    """
    if b"tensorflow" in function:
        return ("torch", "tensorflow", "keras", "spark_elastic.tensorflow")
    if b"keras" in function:  # keras imports the backend that KERAS_BACKEND names
        return ("torch", "keras", "spark_elastic.collective.operations")
    return ("torch", "torch._dynamo")  # the first optimizer in a process imports torch._dynamo, in 2 s


def interpreter() -> str:
    """Describe this process's Python and cloudpickle for error messages."""
    return f"Python {platform.python_version()} ({sys.executable}) with cloudpickle {cloudpickle.__version__}"
