"""The clocks: `monotonic` for deadlines and durations, `wall` (seconds since 1970) for times shown to people."""

from time import monotonic
from time import time as wall

__all__ = ["monotonic", "wall"]
