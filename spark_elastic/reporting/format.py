"""What a bar and a line say, as pure functions of what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_elastic.membership.reasons import Wait, WaitKind
from spark_elastic.membership.wording import counted, missing_in_words, survivors_in_words, wait_in_words

NARROWEST_BAR, WIDEST_BAR = 6, 24


@dataclass(frozen=True, slots=True)
class View:
    """One moment of something that takes long.

    title: what is done. done, total: of `unit`s; total 0: nobody knows. values: what was measured, by name.
    workers: 0: not said. rate: units a second; None: not known yet. seconds: since it began. waiting: in words, instead
    of a rate; left_s: for how long at most.
    """

    title: str
    done: int = 0
    total: int = 0
    unit: str = "rows"
    values: Mapping[str, float] = field(default_factory=dict)
    workers: int = 0
    rate: float | None = None
    seconds: float = 0.0
    waiting: str = ""
    left_s: float | None = None

    @property
    def fraction(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until it is done at this rate."""
        return (self.total - self.done) / self.rate if self.done < self.total and self.rate else None


def right_of_bar(view: View, width: int) -> str:
    """What stands behind the bar, in at most `width` characters: as much as there is room for, never half a word."""
    if view.waiting:
        return wait_and_left(view, width)
    done = f"{short(view.done)}/{short(view.total)} {view.unit}" if view.total else f"{view.done:,} {view.unit}"
    values = [f"{name} {number(value)}" for name, value in view.values.items()]
    workers = counted(view.workers, "worker") if view.workers else ""
    rate = "" if view.rate is None else f"{short(view.rate)} {view.unit}/s"
    eta = "" if view.eta_s is None else f"{clock(view.eta_s)} left"
    parts = [done, *values, workers, rate, eta]
    # What a person looks for first: does it learn, how many are there, how long will it take.
    by_weight = [*values[:1], workers, eta, done, rate, *values[1:]] if view.total else [done, workers, rate]
    chosen: list[str] = []
    for part in filter(None, by_weight):
        if len("  ".join([*chosen, part])) <= width:
            chosen.append(part)
    return "  ".join(part for part in parts if part in chosen)


def wait_and_left(view: View, width: int = 1000) -> str:
    """How long is left stays readable."""
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
    """Of the bar alone, on a line of `width` characters."""
    return max(NARROWEST_BAR, min(WIDEST_BAR, (width - len(title)) // 8))


def plain_line(view: View) -> str:
    """The same without a bar, for logs."""
    if view.waiting:
        return f"{view.title}: {wait_and_left(view)}" if view.title else wait_and_left(view)
    done = f"{view.done:,}/{view.total:,} {view.unit} ({view.fraction:.0%})" if view.total else f"{view.done:,}"
    values = [f"{name} {number(value)}" for name, value in view.values.items()]
    workers = [] if not view.workers else [counted(view.workers, "worker")]
    rate = [] if view.rate is None else [f"{short(view.rate)} {view.unit}/s"]
    eta = [] if view.eta_s is None else [f"{clock(view.eta_s)} left"]
    return f"{view.title}: {', '.join([done, *values, *workers, *rate, *eta])}"


def epoch_line(epoch: int, epochs: int, seconds: float, values: Mapping[str, float]) -> str:
    """epoch: from 0."""
    said = "  ".join(f"{name} {number(value)}" for name, value in values.items())
    return f"epoch {epoch + 1}/{epochs}  {said}  {seconds:.1f} s"


def number(value: float) -> str:
    return f"{value:.4g}"


def short(value: float) -> str:
    """12345.6 -> "12.3k"."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def clock(seconds: float) -> str:
    """75 -> "1:15"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: max(width, 0)]


class Speed:
    """Units a second, over the last seconds alone: a pause shows, and is forgotten."""

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def note(self, now: float, done: int) -> None:
        if self._seen and done < self._seen[-1][1]:
            self._seen = []
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > self.WINDOW_S:
            del self._seen[0]

    @property
    def rate(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start and last > first else None
