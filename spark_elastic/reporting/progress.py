"""What the bar of a job shows, and the lines that stand for it where there is none. Fed by one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_elastic.reporting.format import Speed, View, epoch_line, plain_line, wait_in_words
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
        self._waits: tuple[str, float | None, float] = ("", None, 0.0)
        """Reason, deadline, since when."""
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
            self._waits, self._around = ("", None, now), ("", 0.0)
            self._next_line = now + LINE_EVERY_S
            if self._trains_since is None:
                self._trains_since = now

    def wait(self, reason: str, deadline: float | None, now: float) -> None:
        with self._lock:
            if reason != self._waits[0]:
                self._waits = (reason, deadline, now)
                self._next_line = now + WAIT_S

    def look_around(self, now: float) -> None:
        """Ask `around` if it is time to. Not under the lock: it may take a while."""
        reason, _, since = self._waits
        if not reason or self.around is None or now - since < WAIT_S / 2 or now < self._around[1]:
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
            if view is None or (bar and not (view.waiting and now - self._waits[2] < LINE_EVERY_S)):
                return None
            return plain_line(view)

    def _view(self, now: float) -> View | None:
        reason, deadline, since = self._waits
        live = self._live
        title = "" if live is None else f"epoch {live.epoch + 1}/{live.epochs}"
        if reason and now - since >= (0.5 if live is not None else 0.0):
            around = f": {self._around[0]}" if self._around[0] else ""
            left_s = None if deadline is None else deadline - now
            return View(title, waiting=f"{wait_in_words(reason)}{around}", left_s=left_s)
        if live is not None:
            title = f"{title} validation" if live.phase == "validate" else title
            rate = self._speed.rate
            return View(title, live.rows, live.total, "rows", live.values, self._size, rate)
        if self._steps and self._trains_since is not None and now - self._trains_since >= OWN_LOOP_S:
            return View("training", self._steps, 0, "steps", {}, self._size, self._speed.rate)
        return None
