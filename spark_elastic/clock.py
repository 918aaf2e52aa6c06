"""The clocks: monotonic for deadlines and durations, wall for times that are shown to people."""

from __future__ import annotations

import time


def monotonic() -> float:
    """Return seconds since an arbitrary point; never decreases."""
    return time.monotonic()


def wall() -> float:
    """Return seconds since the epoch."""
    return time.time()
