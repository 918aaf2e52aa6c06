"""What the bar of a job shows, and the lines that stand for it where there is none. Fed by one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_elastic.membership.reasons import Wait
from spark_elastic.reporting.format import Speed, View, epoch_line, plain_line, wait_on_bar
from spark_elastic.wire.messages import EpochEnded, LiveProgress

LINE_EVERY_S = 30.0
"""Between two lines about the same epoch, or the same wait."""
WAIT_S = 2.0
"""A wait that is over sooner is not worth a line."""
LOOK_AROUND_S = 2.0
"""How often a waiting job looks at the cluster."""
OWN_LOOP_S = 3.0
"""Without a word from an estimator's training for so long, the steps of a loop of the user's own are shown."""


class ProgressModel:
    """Times are of a clock that does not go back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: LiveProgress | None = None
        self._speed = Speed()
        self._size = 0
        self._ended: set[int] = set()
        """Epochs whose line was given."""
        self._steps: int | None = None
        self._trains_since: float | None = None
        self._wait: tuple[Wait | None, float | None, float] = (None, None, 0.0)
        """What is waited for (None: nothing), until when at most, and since when."""
        self._next_line: float | None = None
        self.around: Callable[[], str] | None = None
        """Asked for what else is known of a wait, in words, by the thread that shows."""
        self._around = ("", 0.0)
        """What it said, and when to ask again."""

    # --- what the driver tells ------------------------------------------------------------------

    def live(self, told: LiveProgress, now: float) -> None:
        with self._lock:
            before = self._live
            if before is not None and told.epoch < before.epoch:
                return  # of a rank 0 that is gone
            if before is None or (before.epoch, before.phase) != (told.epoch, told.phase):
                self._speed = Speed()
                self._next_line = now + LINE_EVERY_S
            self._live = told
            self._speed.note(now, told.rows)

    def epoch(self, told: EpochEnded, now: float) -> str | None:
        """Returns: its line; None: it was told before."""
        with self._lock:
            if told.epoch in self._ended:
                return None
            self._ended.add(told.epoch)
            last = self._live
            if last is None or last.epoch <= told.epoch:
                rows = last.total if last is not None else 1
                self._live = LiveProgress(told.epoch, told.epochs, "train", rows, rows, told.values)
            return epoch_line(told.epoch, told.epochs, told.seconds, told.values)

    def steps(self, steps: int, now: float) -> None:
        """Optimizer steps, as heartbeats have them."""
        with self._lock:
            self._steps = steps
            if self._live is None:
                self._speed.note(now, steps)

    def world(self, size: int, now: float) -> None:
        with self._lock:
            self._size = size
            self._wait, self._around = (None, None, now), ("", 0.0)
            self._next_line = now + LINE_EVERY_S
            if self._trains_since is None:
                self._trains_since = now

    def wait(self, wait: Wait, deadline: float | None, now: float) -> None:
        """Take in what the job waits for, and until when at most."""
        with self._lock:
            if (wait, deadline) != self._wait[:2]:
                self._wait = (wait, deadline, now)
                self._next_line = now + WAIT_S

    def look_around(self, now: float) -> None:
        """Ask `around` if it is time to. Not under the lock: it may take a while."""
        wait, _, since = self._wait
        if wait is None or self.around is None or now - since < WAIT_S / 2 or now < self._around[1]:
            return
        try:
            said = self.around()
        except Exception:  # Spark is about to end, for one
            said = ""
        self._around = (said, now + LOOK_AROUND_S)

    # --- what is shown --------------------------------------------------------------------------

    def view(self, now: float) -> View | None:
        """None: nothing worth a bar."""
        with self._lock:
            return self._view(now)

    def line(self, now: float, bar: bool) -> str | None:
        """What a log says now; at most one in `LINE_EVERY_S` but for what is new. bar: somebody sees one beside it."""
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
            around = f": {self._around[0]}" if self._around[0] else ""
            left_s = None if deadline is None else deadline - now
            return View(title, waiting=f"{wait_on_bar(wait)}{around}", left_s=left_s)
        if live is not None:
            title = f"{title} validation" if live.phase == "validate" else title
            rate = self._speed.rate
            return View(title, live.rows, live.total, "rows", live.values, self._size, rate)
        if self._steps and self._trains_since is not None and now - self._trains_since >= OWN_LOOP_S:
            return View("training", self._steps, 0, "steps", {}, self._size, self._speed.rate)
        return None
