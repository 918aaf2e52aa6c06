"""How long a place that failed is left alone: its slot first, then its executor, then its host."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.core.topology import Place, SlotId

# One slot that fails says little about its executor, and one executor little about its host: each level cools down
# only from this many failures on (and from there as slowly as a slot does: shortest, twice that, and so on).
_FIRST_COOLED = {"slot": 1, "executor": 3, "host": 6}


@dataclass(frozen=True, slots=True)
class CoolingDown:
    """One place of one kind ("slot", "executor" or "host") that is to be left alone until `until`."""

    kind: str
    name: str
    failures: int
    until: float


@dataclass(slots=True)
class _History:
    failures: int
    last: float
    until: float
    """The place can be used from then on; `last` itself while there were too few failures for a pause."""


class Cooldown:
    """Failures per place, with an exponential pause after them.

    A place that goes without a failure for as long as the longest pause, counted from the end of its own last
    pause, is forgiven and starts from nothing. Failures of one executor or host that come within the shortest pause
    of one another are one failure seen several times (a dead executor takes all its workers with it).

    `range_s` is (shortest, longest) pause in seconds; None: never a pause.
    """

    def __init__(self, range_s: tuple[float, float] | None) -> None:
        self._range_s = range_s
        self._histories: dict[tuple[str, str], _History] = {}

    def failed(self, place: Place, now: float) -> list[CoolingDown]:
        """Count a failure of the place. Returns: what cools down because of it."""
        return [
            cooling
            for kind, name in (("slot", str(place.slot)), ("executor", place.executor), ("host", place.host))
            if (cooling := self._count(kind, name, now)) is not None
        ]

    def slot_failed(self, slot: SlotId, now: float) -> list[CoolingDown]:
        """Count a failure of a slot whose place is not known, or is not to blame."""
        cooling = self._count("slot", str(slot), now)
        return [] if cooling is None else [cooling]

    def ready_at(self, place: Place) -> float:
        """When the place may be used; a time in the past if it may be used now."""
        return max(
            self.slot_ready_at(place.slot), self._until("executor", place.executor), self._until("host", place.host)
        )

    def slot_ready_at(self, slot: SlotId) -> float:
        """When the slot may be launched, wherever it will run."""
        return self._until("slot", str(slot))

    def _until(self, kind: str, name: str) -> float:
        history = self._histories.get((kind, name))
        return float("-inf") if history is None else history.until

    def _count(self, kind: str, name: str, now: float) -> CoolingDown | None:
        if self._range_s is None:
            return None
        shortest, longest = self._range_s
        self._forgive(now, longest)
        history = self._histories.setdefault((kind, name), _History(0, float("-inf"), now))
        if kind != "slot" and now - history.last < shortest:
            return None
        history.failures += 1
        history.last = now
        history.until = now
        doublings = history.failures - _FIRST_COOLED[kind]
        if doublings < 0:
            return None
        # 2**1024 overflows a float; 60 doublings of a nanosecond are 36 years
        history.until = now + min(longest, shortest * 2.0 ** min(doublings, 60))
        return CoolingDown(kind, name, history.failures, history.until)

    def _forgive(self, now: float, longest: float) -> None:
        for key in [key for key, history in self._histories.items() if now >= history.until + longest]:
            del self._histories[key]
