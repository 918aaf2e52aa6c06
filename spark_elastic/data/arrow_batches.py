"""How many rows Spark sends to Python at a time: as many as stay in the processor's cache."""

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
_inside: dict[str, int] = {}
_before: dict[str, str] = {}


@contextmanager
def small_batches(spark: Any) -> Iterator[None]:
    """Small batches for the queries that start in the block.

    A setting of the session, so others that start meanwhile get them too. The last to leave restores it.
    """
    session = str(spark._jsparkSession.sessionUUID())
    with _lock:
        _inside[session] = _inside.get(session, 0) + 1
        if _inside[session] == 1:
            setting, value = _setting(spark)
            _before[session] = spark.conf.get(setting)
            spark.conf.set(setting, value)
    try:
        yield
    finally:
        with _lock:
            _inside[session] -= 1
            if not _inside[session]:
                del _inside[session]
                spark.conf.set(_setting(spark)[0], _before.pop(session))


def _setting(spark: Any) -> tuple[str, str]:
    try:
        spark.conf.get(_BYTES)
    except Exception:  # py4j's or pyspark's, with the version: no such setting
        return _ROWS, str(_BATCH_ROWS)
    return _BYTES, str(_BATCH_BYTES)
