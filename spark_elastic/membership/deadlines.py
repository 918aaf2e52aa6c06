"""Time as the membership machine sees it: pauses of the driver, timers, and the detection of silent processes.

Nothing here reads a clock; times come in as arguments.
"""

from __future__ import annotations

import itertools
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


class Timers:
    """The deadlines of all timers."""

    def __init__(self) -> None:
        self.due: dict[tuple[Timer[Any], Any], float] = {}  # by timer and key

    def next(self) -> float | None:
        """Return the earliest deadline; None: there is none."""
        return min(self.due.values(), default=None)

    def call_next(self, now: float) -> bool:
        """Handle the earliest deadline if it has come. Returns False if it has not."""
        first = min(self.due, key=self.due.__getitem__, default=None)
        if first is None or self.due[first] > now:
            return False
        del self.due[first]
        timer, key = first
        timer.on_due(key, now)
        return True


class Timer(Generic[Key]):
    """Deadlines of one kind, by the slot, agent, worker or host that each belongs to; 0 if there is only one.

    `on_due(key, now)` is called when a deadline has come, `delay_s` after `start`.
    """

    def __init__(self, timers: Timers, on_due: Callable[[Key, float], object], delay_s: float = 0.0) -> None:
        self._due = timers.due
        self.on_due = on_due
        self._delay_s = delay_s

    def start(self, key: Key, now: float) -> None:
        self.set(key, now + self._delay_s)

    def set(self, key: Key, due: float) -> None:
        """Set the key's deadline, in place of the one it has."""
        self._due[self, key] = due

    def cancel(self, key: Key) -> None:
        self._due.pop((self, key), None)

    def due(self, key: Key) -> float | None:
        """Return the key's deadline; None: it has none."""
        return self._due.get((self, key))


class Silence(Generic[Key]):
    """Finds keys that were not heard for `timeout_s`. `heard` takes O(1), as the timeout is the same for all keys."""

    def __init__(self, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._heard: OrderedDict[Key, float] = OrderedDict()  # the longest silent first
        self._not_before = float("-inf")

    def heard(self, key: Key, now: float) -> None:
        """Record a message of the key. Adds the key if it is new."""
        self._heard[key] = now
        self._heard.move_to_end(key)

    def forget(self, key: Key) -> None:
        self._heard.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._heard

    def excuse(self, until: float) -> None:
        """Let no key expire before `until`."""
        self._not_before = max(self._not_before, until)

    def next(self) -> float | None:
        """Return when the first key expires if it is not heard before; None: there is no key."""
        for heard in self._heard.values():
            return max(heard + self._timeout_s, self._not_before)
        return None

    def expired(self, now: float) -> list[Key]:
        """Remove and return the keys that were silent for too long.

        If this call is late by more than a heartbeat interval, the driver itself was stopped or had no CPU time, and
        may not have received messages. The overdue keys get one more interval then.
        """
        due = self.next()
        if due is None or due > now:
            return []
        silent = itertools.takewhile(lambda item: item[1] + self._timeout_s <= now, self._heard.items())
        overdue = [key for key, _ in silent]
        if now > due + self._interval_s:
            for key in overdue:
                self._heard[key] = now - self._timeout_s + self._interval_s
            self._heard = OrderedDict(sorted(self._heard.items(), key=lambda item: item[1]))
            return []
        for key in overdue:
            del self._heard[key]
        return overdue
