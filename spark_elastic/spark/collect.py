"""Collect a DataFrame's rows with a name in Spark's UI, a progress bar and a clean end on Ctrl-C."""

from __future__ import annotations

import sys
import threading
import uuid
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.reporting.progress import View, plain_line
from spark_elastic.reporting.screens import screen_for
from spark_elastic.spark.console import bar_hidden, quiet_log

_CANCEL_S = 10.0  # how long Ctrl-C waits until Spark has ended the job
_SHOWN_AFTER_S = 1.0
_LOOK_S = 0.5
_FIRST_LINE_S = 5.0  # when the first line is printed where no bar can be drawn
_LINE_EVERY_S = 30.0  # between two of these lines


def collect(context: Any, df: Any, name: str, title: str, verbose: int) -> list[Any]:
    """Run `df.collect()` on another thread, with a progress bar.

    So Ctrl-C interrupts this thread while it waits, not in the middle of a call to the JVM: only then can the job be
    cancelled, and its tasks would otherwise continue to write. The job is called `name` in Spark's UI, the progress bar
    `title`; verbose=0 shows no bar.
    """
    from pyspark import InheritableThread

    tag, done = f"spark_elastic-{uuid.uuid4().hex}", {}

    def run() -> None:
        try:
            context.addJobTag(tag)
            for about in ("spark.job.description", "callSite.short"):  # of the job and its stages in Spark's UI
                context.setLocalProperty(about, name)
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
        thread.join(_CANCEL_S)
        raise
    finally:
        over.set()
        if watch is not None:
            watch.join(_CANCEL_S)
    if "error" in done:
        raise done["error"]
    return list(done["rows"])


def _show_progress(context: Any, tag: str, title: str, over: threading.Event) -> None:
    """Show how many tasks of the jobs with a tag are done, until `over` is set."""
    began = clock.monotonic()
    if over.wait(_SHOWN_AFTER_S):
        return  # most jobs end before a bar could be read
    screen = screen_for(None)
    next_line = began + _FIRST_LINE_S
    view: View | None = None
    with suppress(Exception):  # for example because the session ends; `collect` raises that
        while not over.wait(_LOOK_S):
            now = clock.monotonic()
            done, total = _tasks(context, tag)
            rate = done / (now - began) if done else None
            view = View(title, done, total, "tasks", {}, 0, rate, now - began)
            if screen.live:
                screen.show(view)
            elif now >= next_line and total:
                next_line = now + _LINE_EVERY_S
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
