"""What is printed while Spark works: our bar of a query, instead of Spark's own, and warnings alone of its log."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.reporting.progress import View, plain_line
from spark_elastic.reporting.screens import screen_for
from spark_elastic.spark.cluster import CANCEL_S, Cluster, TaskRun
from spark_elastic.spark.jvm import close_connection, setting_of

HIDE_EVERY_S = 0.2
"""Spark draws its bar for stages that last longer than half a second after the last `finishAll`."""
CLOSE_S = 2.0
QUIET_LEVEL = "WARN"
_SHOWN_AFTER_S = 1.0
_LOOK_S = 0.5
_FIRST_LINE_S = 5.0  # when the first line is printed where no bar can be drawn
_LINE_EVERY_S = 30.0  # between two of these lines
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""The environment variable that `spark-submit` gives the Python programs that it starts."""
_DEFAULT_FLAG = "org$apache$spark$internal$Logging$$defaultSparkLog4jConfig"


# --- Spark's progress bar ---------------------------------------------------------------------------


@contextlib.contextmanager
def bar_hidden(context: Any) -> Iterator[None]:
    """Hide Spark's console bar (`spark.ui.showConsoleProgress`) while the block runs, where another bar is shown.

    Both draw in the same line of the terminal. A thread removes it again and again, as Spark does at the end of a job.
    """

    def hide(over: threading.Event) -> None:
        with contextlib.suppress(Exception):  # the context was stopped, or its JVM is gone
            bar = context._jsc.sc().progressBar()
            while bar.isDefined():
                bar.get().finishAll()
                if over.wait(HIDE_EVERY_S):
                    break
        close_connection(context)

    with _beside(hide, CLOSE_S):
        yield


@contextlib.contextmanager
def _beside(work: Callable[[threading.Event], None], close_s: float) -> Iterator[None]:
    """Call a function on a thread while the block runs; the event is set at its end."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name="spark_elastic console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(close_s)


# --- the progress bar of a query --------------------------------------------------------------------


@contextlib.contextmanager
def shown(context: Any, run: TaskRun, title: str) -> Iterator[None]:
    """Show the progress of a call's jobs in a bar while the block runs, in place of Spark's own."""
    with _beside(functools.partial(_show_progress, context, run.tag, title), CANCEL_S), bar_hidden(context):
        yield


def _show_progress(context: Any, tag: str, title: str, over: threading.Event) -> None:
    """Show how many tasks of the jobs with a tag are done, until `over` is set."""
    began = clock.monotonic()
    if over.wait(_SHOWN_AFTER_S):
        return  # most jobs end before a bar could be read
    screen = screen_for(None)
    next_line = began + _FIRST_LINE_S
    view: View | None = None
    with contextlib.suppress(Exception):  # for example because the session ends; `collect` raises that
        while not over.wait(_LOOK_S):
            now = clock.monotonic()
            done, total = _tasks(context, tag)
            rate = done / (now - began) if done else None
            view = View(title, done, total, "tasks", {}, 0, rate)
            if screen.live:
                screen.show(view)
            elif now >= next_line and total:
                next_line = now + _LINE_EVERY_S
                print(f"spark_elastic: {plain_line(view)}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # as above
        if view is not None and screen.live:
            screen.show(replace(view, done=view.total, rate=None))
        screen.clear()
    close_connection(context)


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


# --- Spark's log ------------------------------------------------------------------------------------


def quiet_log(context: Any) -> None:
    """Have Spark log warnings only, as where `python` starts a program, if nobody has configured its log.

    `spark-submit` starts programs with Spark's default log at INFO, some ten lines for each task. Looked at once per
    application.
    """
    if _SUBMITTED not in os.environ or ("log", context.applicationId) in Cluster.done:
        return
    Cluster.done.add(("log", context.applicationId))
    with contextlib.suppress(Exception):  # the classes of a vendor's Spark may differ
        # nobody has configured log4j: Spark uses the configuration in its own jar
        spark = context._jvm.java.lang.Class.forName("org.apache.spark.internal.Logging$").getField("MODULE$").get(None)
        if setting_of(context, "spark.log.level") is not None or not getattr(spark, _DEFAULT_FLAG)():
            return
        # spark-submit sets a threshold for its own lines, which has no effect on the program's; setLogLevel removes it
        if spark.sparkShellThresholdLevel() is None:
            return
        if str(context._jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel()) == "INFO":
            context.setLogLevel(QUIET_LEVEL)
            print(
                "spark_elastic: Spark's log shows only warnings from here on;\n"
                "    spark-submit --conf spark.log.level=INFO shows all of it",
                file=sys.stderr,
                flush=True,
            )
