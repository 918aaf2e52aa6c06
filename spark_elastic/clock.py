"""The one place that reads a clock, so that everything else can be given the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, for deadlines and durations; never for dates."""

    def __call__(self) -> float: ...


def monotonic() -> float:
    """Seconds since an arbitrary point; never goes back."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the epoch, for the stamps that people read."""
    return time.time()
