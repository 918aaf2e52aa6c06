"""The base of callbacks that make an object for each fit: one thread may nest fits, and all events come on it."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

from spark_elastic.errors import MissingExtraError
from spark_elastic.jobs.driver_callbacks import DriverCallback, DriverResult
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import Row


class FitsCallback(DriverCallback):
    """Passes events to the `epoch`, `change` and `end` of the innermost fit, which `on_fit_start` adds to `_fits`."""

    decides_within_s = 0.0

    def __init__(self, package: str) -> None:
        try:
            import_module(package)
        except ImportError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
            raise MissingExtraError(what=type(self).__name__, package=package, extra=package) from None
        self._thread = threading.local()  # each thread's `fits`, the innermost last

    def on_epoch_end(self, row: Row) -> None:
        self._fits()[-1].epoch(row)

    def on_membership_change(self, change: MembershipChange) -> None:
        self._fits()[-1].change(change)

    def on_fit_end(self, result: DriverResult) -> None:
        self._fits().pop().end(result)

    def _fits(self) -> list[Any]:
        fits: list[Any] = self._thread.__dict__.setdefault("fits", [])
        return fits
