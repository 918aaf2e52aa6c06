"""Pauses after failures: for slots, executors and hosts, and between worlds that break without a loss."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.membership.topology import BEGINNING, Place, SlotId, StateVersion

DEFAULT_PAUSES_S = (0.5, 60.0)
"""Shortest and longest pause where a pause is needed although cooldown is off."""
_FEWEST_TRIES = 5
"""A network that was away for a moment gets this many tries, however long the steps are."""


class RegroupBackoff:
    """Counts consecutive worlds that broke early, before any step, with every member still alive.

    The usual cause is a network in which some peers cannot reach others. Without a pause, such worlds would be built
    many times a second.

    Args:
        pauses_s: shortest and longest pause; None: `DEFAULT_PAUSES_S`.
        early_s: a world that lived longer than this has achieved something.
        give_up_s: the series may go on for this long.
    """

    def __init__(self, pauses_s: tuple[float, float] | None, early_s: float, give_up_s: float) -> None:
        self._pauses_s = pauses_s or DEFAULT_PAUSES_S
        self._early_s = early_s
        self._give_up_s = give_up_s
        self._began = (0.0, BEGINNING)  # the newest world: when, and from which state
        self._member_lost = False
        self._first_at = 0.0  # when the first world of the series broke
        self.count = 0
        self.retry_at = float("-inf")
        """When the next world may be built."""

    def world_began(self, version: StateVersion, now: float) -> None:
        """Take in that a world was published."""
        self._began = (now, version)
        self._member_lost = False

    def member_lost(self) -> None:
        """Take in a loss, which explains why the world breaks. Ends the series."""
        self._member_lost = True
        self.count = 0
        self.retry_at = float("-inf")

    def world_broke(self, version: StateVersion, now: float) -> None:
        """Count a broken world, if no loss explains it and it achieved nothing."""
        at, before = self._began
        if self._member_lost or version > before or now - at > self._early_s:
            self.count = 0
            return
        if self.count == 0:
            self._first_at = now
        self.count += 1
        if self.count > 1:  # the first time may be chance
            self.retry_at = now + _pause_s(self._pauses_s, self.count - 2)

    def is_hopeless(self, now: float) -> bool:
        """Return True if it was tried often and long enough."""
        return self.count >= _FEWEST_TRIES and now - self._first_at >= self._give_up_s


def _pause_s(range_s: tuple[float, float], doublings: int) -> float:
    shortest, longest = range_s
    # 2**1024 overflows a float; 60 doublings of a nanosecond are 36 years
    return min(longest, shortest * 2.0 ** min(doublings, 60))


_FIRST_COOLED = {"slot": 1, "executor": 3, "host": 6}
"""From this many failures on a place of the kind cools down: one slot that fails says little about its executor."""


@dataclass(frozen=True, slots=True)
class CoolingDown:
    """A slot, executor or host that is not to be used until `until`."""

    kind: str
    name: str
    failures: int
    until: float


@dataclass(slots=True)
class _History:
    failures: int
    last: float
    until: float
    """When the place may be used; the time of the last failure while there were too few for a pause."""


class Cooldown:
    """Failures of slots, executors and hosts, with an exponential pause after them.

    A place without a failure for as long as the longest pause, counted from the end of its last pause, starts from
    nothing. Failures of one executor or host within the shortest pause of one another count as one: a dead executor
    takes all its workers with it.

    Args:
        range_s: shortest and longest pause in seconds; None: never a pause.
    """

    def __init__(self, range_s: tuple[float, float] | None) -> None:
        self._range_s = range_s
        self._histories: dict[tuple[str, str], _History] = {}

    def failed(self, place: Place, now: float) -> list[CoolingDown]:
        """Count a failure at the place. Returns what cools down because of it."""
        levels = (("slot", str(place.slot)), ("executor", place.executor), ("host", place.host))
        return [cooling for kind, name in levels if (cooling := self._count(kind, name, now)) is not None]

    def slot_failed(self, slot: SlotId, now: float) -> list[CoolingDown]:
        """Count a failure of a slot whose executor is not known, or not to blame."""
        cooling = self._count("slot", str(slot), now)
        return [] if cooling is None else [cooling]

    def ready_at(self, place: Place) -> float:
        """Return when the place may be used; a time in the past if it may be used now."""
        return max(
            self.slot_ready_at(place.slot), self._until("executor", place.executor), self._until("host", place.host)
        )

    def slot_ready_at(self, slot: SlotId) -> float:
        """Return when the slot may be launched, wherever it will run."""
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
        history.until = now + _pause_s(self._range_s, doublings)
        return CoolingDown(kind, name, history.failures, history.until)

    def _forgive(self, now: float, longest: float) -> None:
        for key in [key for key, history in self._histories.items() if now >= history.until + longest]:
            del self._histories[key]
