"""The driver's own time, which stands still while the driver does: a paused machine, a debugger, a call that holds the
GIL. Nobody can be heard then, so no deadline of anybody may run out in it."""

from __future__ import annotations

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
