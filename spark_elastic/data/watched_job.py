"""A Spark job that is waited for: it has a name in Spark's UI, it can be interrupted, and its tasks are counted."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from spark_elastic import clock
from spark_elastic.display.screens import screen_for
from spark_elastic.display.views import View, plain_line

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
