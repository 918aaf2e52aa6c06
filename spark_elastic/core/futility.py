"""Worlds that break one after another although nobody is lost: a network that lets some peers not reach others."""

from __future__ import annotations

from spark_elastic.core.version import BEGINNING, StateVersion

_PAUSES_S = (0.5, 60.0)  # where cooldown is off: without any pause, such worlds are built many times a second
_AT_LEAST = 5  # a network that was away for a moment gets this many tries, however long the steps are


class Futility:
    """Counts worlds in a row that broke young, before any step, with every member still there."""

    def __init__(self, pauses_s: tuple[float, float] | None, young_s: float, give_up_s: float) -> None:
        """`young_s`: a world that lived longer did something; `give_up_s`: how long the trying may go on."""
        self._pauses_s = pauses_s or _PAUSES_S
        self._young_s = young_s
        self._give_up_s = give_up_s
        self._began = (0.0, BEGINNING)  # the newest world: when, and from which state
        self._member_lost = False
        self._first_at = 0.0  # when the first one of the row broke
        self.count = 0
        self.retry_at = float("-inf")
        """Not before then should the next world be built."""

    def began(self, version: StateVersion, now: float) -> None:
        self._began = (now, version)
        self._member_lost = False

    def lost(self) -> None:
        """A member is gone: that is why the world breaks, or broke."""
        self._member_lost = True
        self.count = 0
        self.retry_at = float("-inf")

    def broke(self, version: StateVersion, now: float) -> None:
        at, before = self._began
        if self._member_lost or version > before or now - at > self._young_s:
            self.count = 0
            return
        if self.count == 0:
            self._first_at = now
        self.count += 1
        shortest, longest = self._pauses_s
        if self.count > 1:  # the first time may be chance
            self.retry_at = now + min(longest, shortest * 2.0 ** min(self.count - 2, 60))

    def hopeless(self, now: float) -> bool:
        return self.count >= _AT_LEAST and now - self._first_at >= self._give_up_s
