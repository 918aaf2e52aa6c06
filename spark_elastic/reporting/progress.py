"""The progress bar of a job: the model of what it shows, its texts, and the log lines where there is no bar."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spark_elastic.membership.reasons import Wait, WaitKind, counted, wait_on_bar
from spark_elastic.wire.messages import EpochEnded, LiveProgress

LINE_EVERY_S = 30.0  # time between two log lines about the same epoch, or the same wait
WAIT_S = 2.0  # the shortest wait that gets a log line
USUAL_START_S = 20.0  # how long workers usually take to start; after that, the line says what is missing
SPOKEN_OF = 0.25  # the part of a timeout that passes before it is spoken of
LINE_WIDTH = 80  # columns of a line about the job
LOOK_AT_CLUSTER_S = 2.0  # how often a waiting job asks about the cluster
OWN_LOOP_S = 3.0  # without a message of an estimator's training for this time, the user's own loop is shown


@dataclass(frozen=True, slots=True)
class View:
    """The state of a task with progress at one moment, as a bar or a log line shows it."""

    title: str
    done: int = 0  # units that are done
    total: int = 0  # 0: not known
    unit: str = "rows"
    values: Mapping[str, float] = field(default_factory=dict)  # measured values by name
    workers: int = 0  # 0: not shown
    rate: float | None = None  # units a second; None: not known yet
    waiting: str = ""  # what is waited for; shown in place of the progress
    left_s: float | None = None  # how long the wait may still take

    @property
    def fraction(self) -> float:
        """The done part of the whole; 0 if the total is not known."""
        return min(self.done / self.total, 1.0) if self.total else 0.0


class ProgressModel:
    """What a progress bar shows: the driver's thread updates it, another one reads it. Times are monotonic."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._live: LiveProgress | None = None
        self._speed = Speed()
        self._size = 0
        self._ended: set[int] = set()  # epochs whose line was returned
        self._steps: int | None = None
        self._trains_since: float | None = None
        #: What is waited for (None: nothing), until when at most, and since when.
        self._wait: tuple[Wait | None, float | None, float] = (None, None, 0.0)
        self._next_line: float | None = None
        self._deadline: float | None = None  # the deadline of the newest wait that had one
        self._timed_since = 0.0  # when that was set
        self.imports = "torch"  # the package that takes the workers the longest to import
        #: Describes the cluster during a wait. The thread that prints calls it.
        self.describe_cluster: Callable[[], str] | None = None
        self._cluster = ("", 0.0)  # the newest answer of `describe_cluster`, and when to ask again

    def live(self, message: LiveProgress, now: float) -> None:
        """Store the progress within an epoch."""
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
        """Store the end of an epoch. Returns the line about it; None: it was returned before."""
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
        """Store the optimizer steps that a heartbeat reported."""
        with self._lock:
            self._steps = steps
            if self._live is None:
                self._speed.note(now, steps)

    def world(self, size: int, now: float) -> None:
        """Store that a world of that size trains, and end the wait if there is one."""
        with self._lock:
            self._size = size
            self._wait, self._cluster = (None, None, now), ("", 0.0)
            self._next_line = now + LINE_EVERY_S
            if self._trains_since is None:
                self._trains_since = now

    def wait(self, wait: Wait, deadline: float | None, now: float) -> None:
        """Store what the job waits for, and until when at most."""
        with self._lock:
            if (wait, deadline) != self._wait[:2]:
                self._wait = (wait, deadline, now)
                if deadline is not None and (self._deadline is None or abs(self._deadline - deadline) > 1.0):
                    self._deadline, self._timed_since = deadline, now
                self._next_line = now if _is_start(wait) else now + WAIT_S

    def look_at_cluster(self, now: float) -> None:
        """Call `describe_cluster` if it is due. The lock is not held, because the call may take a while."""
        wait, _, since = self._wait
        if wait is None or self.describe_cluster is None or now - since < WAIT_S / 2 or now < self._cluster[1]:
            return
        try:
            words = self.describe_cluster()
        except Exception:  # Spark may be about to end
            words = ""
        self._cluster = (words, now + LOOK_AT_CLUSTER_S)

    def view(self, now: float) -> View | None:
        """Return what the bar shows; None: there is nothing to show."""
        with self._lock:
            wait, _, since = self._wait
            live = self._live
            title = "" if live is None else f"epoch {live.epoch + 1}/{live.epochs}"
            if wait is not None and now - since >= (0.5 if live is not None else 0.0):
                cluster = f": {self._cluster[0]}" if self._cluster[0] else ""
                words = wait_on_bar(wait)
                if _is_start(wait) and now - since < USUAL_START_S:
                    words = f"starting {counted(wait.want, 'worker')} (each imports {self.imports}, usually 5-20 s)"
                return View(title, waiting=f"{words}{cluster}", left_s=self._left_s(now))
            if live is not None:
                title = f"{title} validation" if live.phase == "validate" else title
                rate = self._speed.rate
                return View(title, live.rows, live.total, "rows", live.values, self._size, rate)
            if self._steps and self._trains_since is not None and now - self._trains_since >= OWN_LOOP_S:
                return View("training", self._steps, 0, "steps", {}, self._size, self._speed.rate)
            return None

    def _left_s(self, now: float) -> float | None:
        """Return what is left of the wait's timeout; None without one, and as long as most of it is left."""
        deadline, begin = self._wait[1], self._timed_since
        if deadline is None or now - begin < SPOKEN_OF * (deadline - begin):
            return None
        return deadline - now

    def line(self, now: float, bar: bool) -> str | None:
        """Return the log line that is due now, or None. `bar`: a progress bar is visible beside the log."""
        with self._lock:
            if self._next_line is None or now < self._next_line:
                return None
            view = self.view(now)
            self._next_line = now + LINE_EVERY_S
            if view is None or (bar and not (view.waiting and WAIT_S <= now - self._wait[2] < LINE_EVERY_S)):
                return None
            return plain_line(view)


def right_of_bar(view: View, width: int) -> str:
    """Return the text to the right of the bar: the most important parts that fit into `width` characters."""
    if view.waiting:
        return wait_and_left(view, width)
    done = f"{short(view.done)}/{short(view.total)} {view.unit}" if view.total else f"{view.done:,} {view.unit}"
    values, workers, rate, eta = _measured(view)
    parts = [done, *values, workers, rate, eta]
    # people look first at the loss, the number of workers and the time that is left
    by_weight = [*values[:1], workers, eta, done, rate, *values[1:]] if view.total else [done, workers, rate]
    chosen: list[str] = []
    for part in filter(None, by_weight):
        if len("  ".join([*chosen, part])) <= width:
            chosen.append(part)
    return "  ".join(part for part in parts if part in chosen)


def wait_and_left(view: View, width: int = 1000) -> str:
    """Return what is waited for and the time that is left. If both do not fit into `width`, the former is shortened."""
    left = "" if view.left_s is None else f"; {max(view.left_s, 0.0):.0f} s left"
    return f"{cut(view.waiting, max(width - len(left), 0))}{left}"[:width]


def plain_line(view: View) -> str:
    """Return a line without a bar, for logs."""
    if view.waiting:
        return f"{view.title}: {wait_and_left(view)}" if view.title else wait_and_left(view)
    done = f"{view.done:,}/{view.total:,} {view.unit} ({view.fraction:.0%})" if view.total else f"{view.done:,}"
    values, workers, rate, eta = _measured(view)
    return f"{view.title}: {', '.join(filter(None, [done, *values, workers, rate, eta]))}"


def _measured(view: View) -> tuple[list[str], str, str, str]:
    """Return the texts of the values, the workers, the rate and the time left; "" for what is not known."""
    values = [f"{name} {value:.4g}" for name, value in view.values.items()]
    workers = counted(view.workers, "worker") if view.workers else ""
    rate = "" if view.rate is None else f"{short(view.rate)} {view.unit}/s"
    eta = f"{clock((view.total - view.done) / view.rate)} left" if view.done < view.total and view.rate else ""
    return values, workers, rate, eta


def epoch_line(epoch: int, epochs: int, seconds: float, values: Mapping[str, float]) -> str:
    """Return the line about an epoch that has ended; `epoch` counts from 0."""
    said = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    return f"epoch {epoch + 1}/{epochs}  {said}  {seconds:.1f} s"


def stop_line(ended: int, epochs: int, reason: str) -> str:
    """Return the line about a training that a callback has stopped after `ended` of its epochs."""
    return f"spark_elastic: training was stopped after epoch {ended}/{epochs}: {reason}"


def short(value: float) -> str:
    """Format a count: 12345.6 -> "12.3k"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def clock(seconds: float) -> str:
    """Format a duration: 75 -> "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def wrapped(text: str, width: int = LINE_WIDTH) -> str:
    """Break lines of more than `width` columns between words; what follows is indented.

    Two spaces separate parts, such as a name and its value. A long line with parts gets single ones, and is broken
    between its parts alone.
    """
    filler = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.splitlines():
        if len(line) > width:
            parts = line.split("  ")
            glued = parts if len(parts) == 1 else [part.replace(" ", "\0") for part in parts]
            line = filler.fill(" ".join(glued)).replace("\0", " ")
        lines.append(line)
    return "\n".join(lines)


def _is_start(wait: Wait) -> bool:
    """Return True if the job waits for its first workers, and nothing has gone wrong so far."""
    return wait.kind is WaitKind.MINIMUM and not wait.have and not wait.missing


def cut(text: str, width: int) -> str:
    """Shorten a text to `width` characters, with "..." at the end."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: max(width, 0)]


class Speed:
    """Measures units per second over the last `WINDOW_S` seconds, so a pause lowers the rate only for a short time."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def note(self, now: float, done: int) -> None:
        """Store how many units are done. If they are fewer than before, the measurement starts over."""
        if self._seen and done < self._seen[-1][1]:
            self._seen = []
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > self.WINDOW_S:
            del self._seen[0]

    @property
    def rate(self) -> float | None:
        """Units a second; None: not known."""
        if len(self._seen) < 2:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start and last > first else None
