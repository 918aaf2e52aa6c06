"""Settings of a Spark session, changed for as long as a query of ours needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Spark's 64 MiB, or 10,000 rows, are written, sent and read one after the other, each time from main memory; with
# 1 MiB the JVM fills one while Python empties another. Rows of 3 KB: twice as many a second.
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 500
"""Where Spark (before 4.0) counts rows only."""

_lock = threading.Lock()
_inside: dict[tuple[str, str], int] = {}
"""(session, setting) → threads that need it changed."""
_before: dict[tuple[str, str], str | None] = {}
"""What to restore once nobody does; None: it was not set."""


@contextmanager
def setting(spark: Any, name: str, value: str) -> Iterator[None]:
    """The session has this setting while the block runs, in all threads. The last to leave restores it."""
    about = (str(spark._jsparkSession.sessionUUID()), name)
    with _lock:
        if not _inside.get(about):
            was_set = spark._jsparkSession.sessionState().conf().contains(name)
            _before[about] = spark.conf.get(name) if was_set else None
            spark.conf.set(name, value)
        _inside[about] = _inside.get(about, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _inside[about] -= 1
            if not _inside[about]:
                del _inside[about]
                before = _before.pop(about)
                if before is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, before)


@contextmanager
def small_batches(spark: Any) -> Iterator[None]:
    """How many rows Spark sends to Python at a time: as many as stay in the processor's cache."""
    try:
        spark.conf.get(_BYTES)
        name, value = _BYTES, str(_BATCH_BYTES)
    except Exception:  # py4j's or pyspark's, with the version: no such setting
        name, value = _ROWS, str(_BATCH_ROWS)
    with setting(spark, name, value):
        yield
