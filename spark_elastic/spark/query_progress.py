"""The progress bar of a query: how many tasks of its jobs are done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.reporting.progress import View, plain_line
from spark_elastic.reporting.screens import screen_for
from spark_elastic.spark.cluster import CANCEL_S, TaskRun
from spark_elastic.spark.console import bar_hidden
from spark_elastic.spark.jvm import close_connection

_SHOWN_AFTER_S = 1.0
_LOOK_S = 0.5
_FIRST_LINE_S = 5.0  # when the first line is printed where no bar can be drawn
_LINE_EVERY_S = 30.0  # between two of these lines


@contextmanager
def shown(context: Any, run: TaskRun, title: str) -> Iterator[None]:
    """Show the progress of a call's jobs in a bar while the block runs, in place of Spark's own."""
    over = threading.Event()
    arguments = (context, run.tag, title, over)
    watch = threading.Thread(target=_show_progress, args=arguments, name="spark_elastic watch", daemon=True)
    watch.start()
    try:
        with bar_hidden(context):
            yield
    finally:
        over.set()
        watch.join(CANCEL_S)


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
