"""A Spark job that is waited for: it has a name in Spark's UI, it can be interrupted, and its tasks are counted."""

from __future__ import annotations

import re
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.errors import DataError, SparkConnectNotSupportedError, SparkElasticError, StoreError
from spark_elastic.reporting.format import View, plain_line
from spark_elastic.reporting.screens import screen_for

# Spark Connect: sessions whose scheduler and JVM are on a server, out of reach from here.


def is_connect(thing: Any) -> bool:
    """Whether a session, or a DataFrame, is one of Spark Connect."""
    return any(cls.__module__.startswith("pyspark.sql.connect") for cls in type(thing).__mro__)


def connect_error() -> SparkConnectNotSupportedError:
    return SparkConnectNotSupportedError(
        "this is a Spark Connect session: its scheduler is on the server, out of reach from here; run the driver "
        "program on the cluster (spark-submit, or a classic session: SparkSession.builder.master(...))"
    )


def refuse_connect(thing: Any) -> None:
    """Raises: SparkConnectNotSupportedError: `thing` is a session, or a DataFrame, of Spark Connect."""
    if is_connect(thing):
        raise connect_error()


# Settings of a Spark session, changed for as long as a query of ours needs them.

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


# Why a Spark job failed, in a sentence: the cause at the bottom, without the JVM's frames and the task's history.

_RAISED = re.compile(r"^([A-Za-z_][\w.]*): ?(.*(?:\n(?![\s]*at |\s*$|Traceback|Driver stacktrace).*)*)", re.MULTILINE)
_STORAGE = ("OSError", "PermissionError", "FileNotFoundError", "StoreError", "ArrowIOError", "NotADirectoryError")


def reason_of(error: BaseException) -> tuple[type[SparkElasticError], str]:
    """What to raise, and its words.

    A StoreError if a task could not write, otherwise a DataError: the query, or the cluster, failed.
    """
    text = _text(error)
    _, found, tail = text.rpartition("Traceback (most recent call last):")
    if found:
        raised = _RAISED.search(tail)
        if raised:
            name = raised.group(1).rpartition(".")[2]
            words = raised.group(2).strip()
            in_writer = "spark_elastic/data/" in tail[: raised.start()]
            kind = StoreError if name in _STORAGE and in_writer else DataError
            return kind, words if name == "StoreError" else f"{name}: {words}"
    return DataError, _root_of_java(error) or text.strip().splitlines()[0]


_LOST_ORDER = re.compile(r"indeterminate (?:output|results|stage|rollback)|cannot rollback ", re.IGNORECASE)
"""Of what Spark says where it cannot do a part of a query again alone: the order of its rows would be another one."""


def has_lost_its_order(error: BaseException) -> bool:
    """Return whether a job failed because Spark lost shuffled rows whose order is not fixed: it can be run again."""
    return _LOST_ORDER.search(f"{_text(error)}\n{error}\n{_root_of_java(error)}") is not None


def _text(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    return str(java.toString()) if java is not None else str(error)


def _root_of_java(error: BaseException) -> str:
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        return ""
    while java.getCause() is not None:
        java = java.getCause()
    return str(java.toString()).splitlines()[0]


CANCEL_S = 10.0
"""How long Ctrl-C waits for Spark to have ended the job."""
SHOWN_AFTER_S = 1.0
LOOK_S = 0.5
LINE_EVERY_S = 30.0
"""Between two lines where there is no bar; the first comes after `FIRST_LINE_S`."""
FIRST_LINE_S = 5.0

_DESCRIPTION, _CALL_SITE = "spark.job.description", "callSite.short"


@contextmanager
def named(context: Any, name: str) -> Iterator[None]:
    """Jobs of this thread are called so in Spark's UI, and their stages; afterwards as the user had it."""
    before = {key: context.getLocalProperty(key) for key in (_DESCRIPTION, _CALL_SITE)}
    for key in before:
        context.setLocalProperty(key, name)
    try:
        yield
    finally:
        for key, value in before.items():
            context.setLocalProperty(key, value)


def collect(df: Any, name: str, title: str, verbose: int) -> list[Any]:
    """`df.collect()` in a thread of its own.

    So that Ctrl-C comes while this thread waits, and not in the middle of a call to the JVM: only then can the job be
    cancelled, whose tasks would write on.

    title: of the bar. verbose: 0: no bar.
    """
    from pyspark import InheritableThread

    context, tag, done = df.sparkSession.sparkContext, f"spark_elastic-{uuid.uuid4().hex}", {}

    def run() -> None:
        try:
            context.addJobTag(tag)
            with named(context, name):
                done["rows"] = df.collect()
        except BaseException as error:  # for the thread that waits
            done["error"] = error

    over = threading.Event()
    watch = None
    thread = InheritableThread(target=run, name="spark_elastic write", daemon=True)
    thread.start()
    if verbose:
        look = _Look(context, tag, title)
        watch = InheritableThread(target=look.until, args=(over,), name="spark_elastic watch", daemon=True)
        watch.start()
    try:
        thread.join()
    except BaseException:
        context.cancelJobsWithTag(tag)
        thread.join(CANCEL_S)
        raise
    finally:
        over.set()
        if watch is not None:
            watch.join(CANCEL_S)
    if "error" in done:
        raise done["error"]
    return list(done["rows"])


class _Look:
    """Counts a tag's tasks, on a thread of its own, and shows how far they are."""

    def __init__(self, context: Any, tag: str, title: str) -> None:
        self._context = context
        self._tag = tag
        self._title = title

    def until(self, over: threading.Event) -> None:
        began = clock.monotonic()
        if over.wait(SHOWN_AFTER_S):
            return  # most are done before anybody could read it
        screen = screen_for(None)
        next_line = began + FIRST_LINE_S
        view: View | None = None
        try:
            while not over.wait(LOOK_S):
                now = clock.monotonic()
                done, total = self._tasks()
                rate = done / (now - began) if done else None
                view = View(self._title, done, total, "tasks", {}, 0, rate, now - began)
                if screen.live:
                    screen.show(view)
                elif now >= next_line and total:
                    next_line = now + LINE_EVERY_S
                    print(f"spark_elastic: {plain_line(view)}", file=sys.stderr, flush=True)
        except Exception:  # the session ends, for one: whoever waits for the job hears of it
            pass
        finally:
            with suppress(Exception):  # as above
                if view is not None and screen.live:
                    screen.show(replace(view, done=view.total, rate=None))
                screen.clear()

    def _tasks(self) -> tuple[int, int]:
        """Done, and in all, of the stages that were not skipped."""
        tracker = self._context._jsc.sc().statusTracker()
        done = total = 0
        for job in tracker.getJobIdsForTag(self._tag):
            info = tracker.getJobInfo(job)
            for stage in info.get().stageIds() if info.isDefined() else ():
                found = tracker.getStageInfo(stage)
                if found.isDefined():
                    done += found.get().numCompletedTasks()
                    total += found.get().numTasks()
        return done, total
