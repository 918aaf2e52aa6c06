"""The texts of a progress bar and of log lines, as pure functions of a `View`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_elastic.membership.reasons import Wait, WaitKind
from spark_elastic.membership.wording import counted, missing_in_words, survivors_in_words, wait_in_words

NARROWEST_BAR, WIDEST_BAR = 6, 24


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a task with progress."""

    title: str
    done: int = 0
    """Units that are done."""
    total: int = 0
    """0: not known."""
    unit: str = "rows"
    values: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name."""
    workers: int = 0
    """0: not shown."""
    rate: float | None = None
    """Units a second; None: not known yet."""
    seconds: float = 0.0
    """Time since the task began."""
    waiting: str = ""
    """What is waited for; shown in place of the progress."""
    left_s: float | None = None
    """How long the wait may still take."""

    @property
    def fraction(self) -> float:
        """The done part of the whole; 0 if the total is not known."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until it is done at this rate; None: not known, or done."""
        return (self.total - self.done) / self.rate if self.done < self.total and self.rate else None


def right_of_bar(view: View, width: int) -> str:
    """Return the text to the right of the bar: the most important parts that fit into `width` characters."""
    if view.waiting:
        return wait_and_left(view, width)
    done = f"{short(view.done)}/{short(view.total)} {view.unit}" if view.total else f"{view.done:,} {view.unit}"
    values = [f"{name} {number(value)}" for name, value in view.values.items()]
    workers = counted(view.workers, "worker") if view.workers else ""
    rate = "" if view.rate is None else f"{short(view.rate)} {view.unit}/s"
    eta = "" if view.eta_s is None else f"{clock(view.eta_s)} left"
    parts = [done, *values, workers, rate, eta]
    # people look first at the loss, the number of workers and the time that is left
    by_weight = [*values[:1], workers, eta, done, rate, *values[1:]] if view.total else [done, workers, rate]
    chosen: list[str] = []
    for part in filter(None, by_weight):
        if len("  ".join([*chosen, part])) <= width:
            chosen.append(part)
    return "  ".join(part for part in parts if part in chosen)


def wait_and_left(view: View, width: int = 1000) -> str:
    """Return what is waited for and the time that is left; only the former is cut."""
    left = "" if view.left_s is None else f"; {max(view.left_s, 0.0):.0f} s left"
    return f"{cut(view.waiting, max(width - len(left), 0))}{left}"[:width]


def wait_on_bar(wait: Wait) -> str:
    """Return what is waited for with the missing part first, and without the time, which the bar counts down."""
    match wait.kind:
        case WaitKind.MINIMUM:
            words = f"waiting for {wait.want - wait.have} of {counted(wait.want, 'worker')}"
            words += f" ({wait.need} would do)" if wait.need < wait.want else ""
        case WaitKind.GRACE:
            words = f"waiting for {wait.want - wait.have} of {counted(wait.want, 'worker')}; the others are ready"
        case WaitKind.REPLACEMENTS:
            words = f"waiting for {wait.need - wait.have} of {counted(wait.need, 'worker')}, keeping the state"
        case WaitKind.SLOTS:
            words = f"waiting for {wait.need - wait.have} of {counted(wait.need, 'slot')}"
        case WaitKind.SURVIVORS:
            words = f"waiting for {wait.have} to come back from the broken round{survivors_in_words(wait)}"
        case _:
            return wait_in_words(wait)
    missing = missing_in_words(wait.missing)
    return f"{words}; {missing}" if missing else words


def bar_width(title: str, width: int) -> int:
    """Return the width of the bar alone, on a line of `width` characters."""
    return max(NARROWEST_BAR, min(WIDEST_BAR, (width - len(title)) // 8))


def plain_line(view: View) -> str:
    """Return a line without a bar, for logs."""
    if view.waiting:
        return f"{view.title}: {wait_and_left(view)}" if view.title else wait_and_left(view)
    done = f"{view.done:,}/{view.total:,} {view.unit} ({view.fraction:.0%})" if view.total else f"{view.done:,}"
    values = [f"{name} {number(value)}" for name, value in view.values.items()]
    workers = [] if not view.workers else [counted(view.workers, "worker")]
    rate = [] if view.rate is None else [f"{short(view.rate)} {view.unit}/s"]
    eta = [] if view.eta_s is None else [f"{clock(view.eta_s)} left"]
    return f"{view.title}: {', '.join([done, *values, *workers, *rate, *eta])}"


def epoch_line(epoch: int, epochs: int, seconds: float, values: Mapping[str, float]) -> str:
    """Return the line about an epoch that has ended; `epoch` counts from 0."""
    said = "  ".join(f"{name} {number(value)}" for name, value in values.items())
    return f"epoch {epoch + 1}/{epochs}  {said}  {seconds:.1f} s"


def number(value: float) -> str:
    """Format a measured value: 0.31234 -> "0.3123"."""
    return f"{value:.4g}"


def short(value: float) -> str:
    """Format a count: 12345.6 -> "12.3k"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def clock(seconds: float) -> str:
    """Format a duration: 75 -> "1:15"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def cut(text: str, width: int) -> str:
    """Cut a text to `width` characters, with "..." at the end."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: max(width, 0)]


class Speed:
    """Units a second over the last few seconds, so that a pause shows and is soon over."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def note(self, now: float, done: int) -> None:
        """Take in how many units are done. Fewer than before start the measurement anew."""
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
