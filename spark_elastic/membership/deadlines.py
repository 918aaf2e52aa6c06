"""Time as the membership machine sees it: pauses of the driver, and timers.

Nothing here reads a clock; times come in as arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

_CLOCK_STEP_S = 5.0  # the largest jump of the wall clock that is a correction; else the computer slept


class MachineClock:
    """Turns readings of the clocks into the membership machine's time, which stops while the driver is paused.

    A suspended computer, a debugger or a call that holds the GIL pauses the driver. It receives no message then, so no
    deadline may expire. A gap of more than twice `read_every_s`, the usual time between readings, is a pause.
    """

    def __init__(self, read_every_s: float) -> None:
        self._read_every_s = read_every_s
        self._last: tuple[float, float] | None = None
        self.paused_s = 0.0  # seconds by which the membership machine's time is behind the monotonic clock

    def read(self, monotonic: float, wall: float) -> tuple[float, float]:
        """Return the membership machine's time, and the length of the pause that has just ended (0: there was none)."""
        last, self._last = self._last, (monotonic, wall)
        paused = 0.0
        if last is not None:
            gap = monotonic - last[0]
            if gap > 2 * self._read_every_s:
                paused = gap - self._read_every_s
                self.paused_s += paused
            # on some systems the monotonic clock stops while the computer sleeps
            asleep = (wall - last[1]) - gap
            if asleep > max(_CLOCK_STEP_S, 2 * self._read_every_s):
                paused += asleep
        return monotonic - self.paused_s, paused


def paused_within(last_s: float, now: float, pauses: Sequence[tuple[float, float]]) -> float:
    """Return for how many of the last `last_s` seconds, by the workers' clocks, the driver was paused.

    `pauses` are its newest pauses: the membership machine's time when each ended, and the length. The machine's time
    does not advance during a pause, and the workers' clocks do.
    """
    total = 0.0
    for ended, seconds in reversed(pauses):
        if ended <= now - last_s:
            break
        total += seconds
        last_s -= seconds
    return total


Key = TypeVar("Key", bound=Hashable)


class Timer(Generic[Key]):
    """Deadlines of one kind, by the slot, agent, worker or host that each belongs to; 0: the job.

    `on_due(key, now)` is called when a deadline has come, `delay_s` after `start`.
    """

    def __init__(self, timers: list[Timer[Any]], on_due: Callable[[Key, float], object], delay_s: float = 0.0) -> None:
        """`timers`: the machine's, to which this one is added. Of equal deadlines, those of the first come first."""
        self._on_due = on_due
        self._delay_s = delay_s
        self._due: OrderedDict[Key, float] = OrderedDict()  # the earliest first
        self._not_before = float("-inf")
        timers.append(self)

    def start(self, key: Key, now: float) -> None:
        """Set the key's deadline, in place of the one it has. O(1), as the delay is the same for all keys."""
        self._due[key] = max(now + self._delay_s, self._not_before)
        self._due.move_to_end(key)

    def set(self, key: Key, due: float) -> None:
        """Set the key's deadline to another time."""
        self._due[key] = due
        self._due = OrderedDict(sorted(self._due.items(), key=lambda item: item[1]))

    def cancel(self, key: Key) -> None:
        self._due.pop(key, None)

    def due(self, key: Key) -> float | None:
        """Return the key's deadline; None: it has none."""
        return self._due.get(key)

    def postpone(self, until: float) -> None:
        """Let no deadline come before `until`, nor those that are started later."""
        self._not_before = max(self._not_before, until)
        for key, due in self._due.items():
            self._due[key] = max(due, until)

    def next(self) -> float:
        """Return the earliest deadline; infinity: there is none."""
        return next(iter(self._due.values()), float("inf"))

    def ring(self, now: float) -> None:
        """Handle the earliest deadline."""
        key, _ = self._due.popitem(last=False)
        self._on_due(key, now)
