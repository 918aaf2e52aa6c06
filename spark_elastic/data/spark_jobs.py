"""Spark jobs with a name in Spark's UI, a progress bar and a clean end on Ctrl-C; settings; reasons of failures.

On Spark Connect jobs have neither name nor bar: its scheduler is on a server, out of reach of this process.
"""

from __future__ import annotations

import re
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.data.spark_connect import Query, is_connect
from spark_elastic.data.spark_console import bar_hidden, quiet_log
from spark_elastic.errors import DataError, SparkElasticError, StoreError
from spark_elastic.reporting.progress import View, plain_line
from spark_elastic.reporting.screens import screen_for

# --- session settings -------------------------------------------------------------------------------

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
def setting(spark: Any, name: str, value: str) -> Iterator[None]:
    """Change a setting of the session while the block runs. The last of several threads to leave restores it."""
    about = (str(spark.session_id if is_connect(spark) else spark._jsparkSession.sessionUUID()), name)
    with _lock:
        users, before = _changed.get(about, (0, None))
        if not users:
            before = spark.conf.get(name) if _is_set(spark, name) else None
            spark.conf.set(name, value)
        _changed[about] = (users + 1, before)
    try:
        yield
    finally:
        with _lock:
            users, before = _changed.pop(about)
            if users > 1:
                _changed[about] = (users - 1, before)
            elif before is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)


def _is_set(spark: Any, name: str) -> bool:
    if not is_connect(spark):
        return bool(spark._jsparkSession.sessionState().conf().contains(name))
    every = getattr(spark.conf, "getAll", None)  # from Spark 4 on; without it, the default is set as the value
    return every is None or name in every


@contextmanager
def small_batches(spark: Any) -> Iterator[None]:
    """Let Spark send Arrow batches to Python that fit into the processor's cache, while the block runs."""
    try:
        spark.conf.get(_BYTES)
        name, value = _BYTES, str(_BATCH_BYTES)
    except Exception:  # py4j's or pyspark's, with the version: no such setting
        name, value = _ROWS, str(_BATCH_ROWS)
    with setting(spark, name, value):
        yield


# --- reasons of failed jobs -------------------------------------------------------------------------

_RAISED = re.compile(r"^([A-Za-z_][\w.]*): ?(.*(?:\n(?![\s]*at |\s*$|Traceback|Driver stacktrace).*)*)", re.MULTILINE)
_PYTHON_DIED = "Python worker exited unexpectedly"
"""Spark's words; the cause that it gives is an EOFException."""
_STORAGE = ("OSError", "PermissionError", "FileNotFoundError", "StoreError", "ArrowIOError", "NotADirectoryError")


def reason_of(error: BaseException) -> tuple[type[SparkElasticError], str]:
    """Return the error to raise for a failed Spark job, and its reason in a sentence without the JVM's frames.

    It is a StoreError if a task could not write, otherwise a DataError: the query, or the cluster, failed.
    """
    text = _text(error)
    _, found, tail = text.rpartition("Traceback (most recent call last):")
    if found and (raised := _RAISED.search(tail)):
        name, words = raised[1].rpartition(".")[2], raised[2].strip()
        in_writer = "spark_elastic/data/" in tail[: raised.start()]
        kind = StoreError if name in _STORAGE and in_writer else DataError
        return kind, words if name == "StoreError" else f"{name}: {words}"
    if _PYTHON_DIED in text:
        return DataError, (
            "a Python process of Spark ended in the middle of its rows. Either it was killed, most often because the "
            "machine or the container had no memory left (spark.executor.memoryOverhead, "
            "spark.executor.pyspark.memory), or a function of the query ended it"
        )
    return DataError, _root_of_java(error) or text.strip().splitlines()[0]


_LOST_ORDER = re.compile(r"indeterminate (?:output|results|stage|rollback)|cannot rollback ", re.IGNORECASE)
"""Spark's words if it cannot recompute a part of a query, because its rows would come in another order."""


def has_lost_its_order(error: BaseException) -> bool:
    """Return whether a job failed because Spark lost shuffled rows of no fixed order. It can be repeated."""
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


# --- jobs with progress -----------------------------------------------------------------------------

CANCEL_S = 10.0  # how long Ctrl-C waits until Spark has ended the job
SHOWN_AFTER_S = 1.0
LOOK_S = 0.5
FIRST_LINE_S = 5.0  # when the first line is printed where no bar can be drawn
LINE_EVERY_S = 30.0  # between two of these lines


@contextmanager
def named(context: Any, name: str) -> Iterator[None]:
    """Name the jobs of this thread, and their stages, in Spark's UI while the block runs."""
    before = {key: context.getLocalProperty(key) for key in ("spark.job.description", "callSite.short")}
    for key in before:
        context.setLocalProperty(key, name)
    try:
        yield
    finally:
        for key, value in before.items():
            context.setLocalProperty(key, value)


def collect(df: Any, name: str, title: str, verbose: int) -> list[Any]:
    """Run `df.collect()` on another thread, with a progress bar.

    So Ctrl-C interrupts this thread while it waits, not in the middle of a call to the JVM: only then can the job be
    cancelled, and its tasks would otherwise continue to write. The job is called `name` in Spark's UI, the progress bar
    `title`; verbose=0 shows no bar.
    """
    if is_connect(df):
        return _collect_on_connect(df)
    from pyspark import InheritableThread

    context, tag, done = df.sparkSession.sparkContext, f"spark_elastic-{uuid.uuid4().hex}", {}

    def run() -> None:
        try:
            context.addJobTag(tag)
            with named(context, name):
                done["rows"] = df.collect()
        except BaseException as error:  # raised by `collect`
            done["error"] = error

    over = threading.Event()
    quiet_log(context, verbose)
    thread = InheritableThread(target=run, name="spark_elastic write", daemon=True)
    thread.start()
    watch = None
    if verbose:
        shown = (context, tag, title, over)
        watch = InheritableThread(target=_show_progress, args=shown, name="spark_elastic watch", daemon=True)
        watch.start()
    try:
        with bar_hidden(context) if verbose else nullcontext():
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


def _collect_on_connect(df: Any) -> list[Any]:
    query = Query(df.sparkSession, lambda spark: list(df.collect()), name="write")
    try:
        query.over.wait()
    except BaseException:
        query.cancel(CANCEL_S)
        raise
    if query.error is not None:
        raise query.error
    return query.rows


def _show_progress(context: Any, tag: str, title: str, over: threading.Event) -> None:
    """Show how many tasks of the jobs with a tag are done, until `over` is set."""
    began = clock.monotonic()
    if over.wait(SHOWN_AFTER_S):
        return  # most jobs end before a bar could be read
    screen = screen_for(None)
    next_line = began + FIRST_LINE_S
    view: View | None = None
    with suppress(Exception):  # for example because the session ends; `collect` raises that
        while not over.wait(LOOK_S):
            now = clock.monotonic()
            done, total = _tasks(context, tag)
            rate = done / (now - began) if done else None
            view = View(title, done, total, "tasks", {}, 0, rate, now - began)
            if screen.live:
                screen.show(view)
            elif now >= next_line and total:
                next_line = now + LINE_EVERY_S
                print(f"spark_elastic: {plain_line(view)}", file=sys.stderr, flush=True)
    with suppress(Exception):  # as above
        if view is not None and screen.live:
            screen.show(replace(view, done=view.total, rate=None))
        screen.clear()


def _tasks(context: Any, tag: str) -> tuple[int, int]:
    """Return how many tasks are done, and how many there are, in stages that are not skipped."""
    tracker = context._jsc.sc().statusTracker()
    done = total = 0
    for job in tracker.getJobIdsForTag(tag):
        info = tracker.getJobInfo(job)
        for stage in info.get().stageIds() if info.isDefined() else ():
            found = tracker.getStageInfo(stage)
            if found.isDefined():
                done += found.get().numCompletedTasks()
                total += found.get().numTasks()
    return done, total
