"""The model of a job's progress bar: what it shows, and the log lines where there is no bar."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_elastic.membership.reasons import Wait
from spark_elastic.reporting.format import Speed, View, epoch_line, plain_line, wait_on_bar
from spark_elastic.wire.messages import EpochEnded, LiveProgress

LINE_EVERY_S = 30.0
"""Time between two log lines about the same epoch, or the same wait."""
WAIT_S = 2.0
"""A wait that is over sooner is not worth a line."""
LOOK_AT_CLUSTER_S = 2.0
"""How often a waiting job asks about the cluster."""
OWN_LOOP_S = 3.0
"""After this time without a message of an estimator's training, the steps of the user's own loop are shown."""


class ProgressModel:
    """Fed by the driver's thread, read by the thread that prints. Times are of a clock that does not go back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: LiveProgress | None = None
        self._speed = Speed()
        self._size = 0
        #: Epochs whose line was given out.
        self._ended: set[int] = set()
        self._steps: int | None = None
        self._trains_since: float | None = None
        #: What is waited for (None: nothing), until when at most, and since when.
        self._wait: tuple[Wait | None, float | None, float] = (None, None, 0.0)
        self._next_line: float | None = None
        self.describe_cluster: Callable[[], str] | None = None
        """Returns what is known of the cluster during a wait, in words. Called by the thread that prints."""
        #: Its last answer, and when to ask again.
        self._cluster = ("", 0.0)

    # --- input --------------------------------------------------------------------------------------

    def live(self, message: LiveProgress, now: float) -> None:
        """Take in the progress within an epoch."""
        with self._lock:
            before = self._live
            if before is not None and message.epoch < before.epoch:
                return  # from a rank 0 that is gone
            if before is None or (before.epoch, before.phase) != (message.epoch, message.phase):
                self._speed = Speed()
                self._next_line = now + LINE_EVERY_S
            self._live = message
            self._speed.note(now, message.rows)

    def epoch(self, message: EpochEnded, now: float) -> str | None:
        """Take in the end of an epoch. Returns its line; None: it was given out before."""
        with self._lock:
            if message.epoch in self._ended:
                return None
            self._ended.add(message.epoch)
            last = self._live
            if last is None or last.epoch <= message.epoch:
                rows = last.total if last is not None else 1
                self._live = LiveProgress(message.epoch, message.epochs, "train", rows, rows, message.values)
            return epoch_line(message.epoch, message.epochs, message.seconds, message.values)

    def steps(self, steps: int, now: float) -> None:
        """Take in the optimizer steps of a heartbeat."""
        with self._lock:
            self._steps = steps
            if self._live is None:
                self._speed.note(now, steps)

    def world(self, size: int, now: float) -> None:
        """Take in that a world of that size trains, which ends any wait."""
        with self._lock:
            self._size = size
            self._wait, self._cluster = (None, None, now), ("", 0.0)
            self._next_line = now + LINE_EVERY_S
            if self._trains_since is None:
                self._trains_since = now

    def wait(self, wait: Wait, deadline: float | None, now: float) -> None:
        """Take in what the job waits for, and until when at most."""
        with self._lock:
            if (wait, deadline) != self._wait[:2]:
                self._wait = (wait, deadline, now)
                self._next_line = now + WAIT_S

    def look_at_cluster(self, now: float) -> None:
        """Call `describe_cluster` if it is time to. Not under the lock: it may take a while."""
        wait, _, since = self._wait
        if wait is None or self.describe_cluster is None or now - since < WAIT_S / 2 or now < self._cluster[1]:
            return
        try:
            words = self.describe_cluster()
        except Exception:  # Spark may be about to end
            words = ""
        self._cluster = (words, now + LOOK_AT_CLUSTER_S)

    # --- output -------------------------------------------------------------------------------------

    def view(self, now: float) -> View | None:
        """Return what the bar shows; None: nothing worth a bar."""
        with self._lock:
            return self._view(now)

    def line(self, now: float, bar: bool) -> str | None:
        """Return the log line that is due now; None: none is. `bar`: a progress bar is visible beside the log."""
        with self._lock:
            if self._next_line is None or now < self._next_line:
                return None
            view = self._view(now)
            self._next_line = now + LINE_EVERY_S
            if view is None or (bar and not (view.waiting and now - self._wait[2] < LINE_EVERY_S)):
                return None
            return plain_line(view)

    def _view(self, now: float) -> View | None:
        wait, deadline, since = self._wait
        live = self._live
        title = "" if live is None else f"epoch {live.epoch + 1}/{live.epochs}"
        if wait is not None and now - since >= (0.5 if live is not None else 0.0):
            cluster = f": {self._cluster[0]}" if self._cluster[0] else ""
            left_s = None if deadline is None else deadline - now
            return View(title, waiting=f"{wait_on_bar(wait)}{cluster}", left_s=left_s)
        if live is not None:
            title = f"{title} validation" if live.phase == "validate" else title
            rate = self._speed.rate
            return View(title, live.rows, live.total, "rows", live.values, self._size, rate)
        if self._steps and self._trains_since is not None and now - self._trains_since >= OWN_LOOP_S:
            return View("training", self._steps, 0, "steps", {}, self._size, self._speed.rate)
        return None
