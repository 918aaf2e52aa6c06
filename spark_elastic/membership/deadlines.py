"""Deadlines by name, cheap for a thousand workers."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

# The driver's own time, which stands still while the driver does: a paused machine, a debugger, a call that holds the
# GIL. Nobody can be heard then, so no deadline of anybody may run out in it.

_CLOCK_STEP_S = 5.0
"""A wall clock that is set right moves by less; a machine that slept was away for longer."""


class Attention:
    """Turns readings of the clocks into the machine's time, without the pauses between two looks.

    Args:
        look_every_s: how often somebody looks while all is well. A gap of more than twice that is a pause.
    """

    def __init__(self, look_every_s: float) -> None:
        self._look_every_s = look_every_s
        self._last: tuple[float, float] | None = None
        self.away_s = 0.0
        """By how much the machine's time is behind the clock."""

    def look(self, monotonic: float, wall: float) -> tuple[float, float]:
        """Returns: the machine's time, and for how long the driver has just stood still (0: it has not)."""
        last, self._last = self._last, (monotonic, wall)
        paused = 0.0
        if last is not None:
            gap = monotonic - last[0]
            if gap > 2 * self._look_every_s:
                paused = gap - self._look_every_s
                self.away_s += paused
            # a machine that sleeps stops the monotonic clock on some systems
            asleep = (wall - last[1]) - gap
            if asleep > max(_CLOCK_STEP_S, 2 * self._look_every_s):
                paused += asleep
        return monotonic - self.away_s, paused


Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """One deadline per key: O(log n) to set, O(1) to cancel, replaced ones are dropped when they surface."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0  # keys need no order of their own

    def set(self, key: Key, due: float) -> None:
        """Fire `key` at `due`, instead of any earlier wish."""
        if self._due.get(key) == due:
            return
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        self._due.pop(key, None)

    def get(self, key: Key) -> float | None:
        return self._due.get(key)

    def next(self) -> float | None:
        """The earliest deadline; None if there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Key | None:
        """Take one key that is due, earliest first; None if none is."""
        due = self.next()
        if due is None or due > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key


class Silence(Generic[Key]):
    """Who was not heard for `timeout_s`: O(1) for a sign of life, because the timeout is the same for all."""

    def __init__(self, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._heard: OrderedDict[Key, float] = OrderedDict()  # the longest silent first
        self._not_before = float("-inf")

    def heard(self, key: Key, now: float) -> None:
        self._heard[key] = now
        self._heard.move_to_end(key)

    def forget(self, key: Key) -> None:
        self._heard.pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._heard

    def excuse(self, until: float) -> None:
        """Let nobody's silence count before then."""
        self._not_before = max(self._not_before, until)

    def next(self) -> float | None:
        """When the first one will have been silent too long."""
        for heard in self._heard.values():
            return max(heard + self._timeout_s, self._not_before)
        return None

    def expired(self, now: float) -> list[Key]:
        """Those silent too long. Each is forgotten.

        If we ourselves come late by more than a heartbeat, it was this side that did not listen (a stopped driver, a
        starved machine): everybody gets one more interval to be heard.
        """
        due = self.next()
        if due is None or due > now:
            return []
        overdue = [key for key, heard in self._heard.items() if heard + self._timeout_s <= now]
        if now > due + self._interval_s:
            for key in overdue:
                self._heard[key] = now - self._timeout_s + self._interval_s
            self._heard = OrderedDict(sorted(self._heard.items(), key=lambda item: item[1]))
            return []
        for key in overdue:
            del self._heard[key]
        return overdue
