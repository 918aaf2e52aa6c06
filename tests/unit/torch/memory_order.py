"""What ARM's memory model allows of a few instructions, and a detector of races in recorded accesses to shared memory.

`outcomes` runs small programs in every order that the model (multi-copy atomic, as ARMv8) allows. `RaceDetector` says
which accesses nothing but luck has ordered: only a fence before a counter's store, with one after a load of that count,
does. Programs without races have the same results as in program order, so one order of each is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# --- every order that ARM allows --------------------------------------------------------------------------


class Access(NamedTuple):
    """A load or a store of one thread."""

    kind: str
    """ "load" or "store"."""
    place: str
    value: int = 0
    """The value that is stored."""
    ordered: bool = False
    """A load-acquire or a store-release."""


def load(place: str) -> Access:
    return Access("load", place)


def store(place: str, value: int = 1) -> Access:
    return Access("store", place, value)


def lock_calls(calls: Sequence[str], thread: int) -> list[Access]:
    """Translate calls of a lock that no other thread uses, as the C library and Python implement them."""
    place = f"lock of {thread}"
    acquired = [Access("load", place, ordered=True), store(place, 1)]
    released = [Access("store", place, 0, ordered=True)]
    return [access for call in calls for access in (acquired if call == "acquire" else released)]


def must_precede(first: Access, second: Access) -> bool:
    """Return True if ARM performs `first` before `second`, which comes later in the program."""
    if first.place == second.place:
        return not (first.kind == "store" and second.kind == "load") or (first.ordered and second.ordered)
    is_acquire = first.kind == "load" and first.ordered
    is_release = second.kind == "store" and second.ordered
    release_then_acquire = first.kind == "store" and second.kind == "load" and first.ordered and second.ordered
    return is_acquire or is_release or release_then_acquire


def outcomes(*threads: Sequence[Access]) -> set[tuple[tuple[int, ...], ...]]:
    """Return what the plain loads of each thread can see, over all orders that the model allows."""
    before = [
        [{i for i in range(j) if must_precede(of[i], of[j])} for j in range(len(of))] for of in map(list, threads)
    ]
    found = set()
    visited = set()
    pending = [(tuple(frozenset[int]() for _ in threads), (), ())]
    while pending:
        state = pending.pop()
        if state in visited:
            continue
        visited.add(state)
        done, memory, seen = state
        if all(len(of) == len(finished) for of, finished in zip(threads, done, strict=True)):
            found.add(tuple(tuple(v for t, _, v in sorted(seen) if t == thread) for thread in range(len(threads))))
        for thread, of in enumerate(threads):
            for index, access in enumerate(of):
                if index in done[thread] or not before[thread][index] <= done[thread]:
                    continue
                now = (*done[:thread], done[thread] | {index}, *done[thread + 1 :])
                if access.kind == "store":
                    changed = dict(memory) | {access.place: access.value}
                    pending.append((now, tuple(sorted(changed.items())), seen))
                elif access.ordered:
                    pending.append((now, memory, seen))
                else:
                    mine = [i for i in range(index) if of[i].place == access.place and of[i].kind == "store"]
                    waiting = [of[i].value for i in mine if i not in done[thread]]  # forwarded before it is visible
                    value = waiting[-1] if waiting else dict(memory).get(access.place, 0)
                    pending.append((now, memory, (*seen, (thread, index, value))))
    return found


# --- races in recorded accesses -----------------------------------------------------------------------------

Clock = dict[int, int]


def _joined(one: Clock, other: Clock) -> Clock:
    return {member: max(one.get(member, 0), other.get(member, 0)) for member in one.keys() | other.keys()}


@dataclass
class RaceDetector:
    """Vector clocks: an access is ordered after another if the other's number is in its member's clock."""

    races: list[str] = field(default_factory=list)
    _clocks: dict[int, Clock] = field(default_factory=dict)
    _released: dict[int, Clock] = field(default_factory=dict)
    """Each member's clock at its last fence: what its next counters announce."""
    _seen: dict[int, Clock] = field(default_factory=dict)
    """What the counts that a member has loaded announce; it counts from the member's next fence on."""
    _announced: dict[tuple[int, int], list[tuple[int, Clock]]] = field(default_factory=dict)
    _writes: dict[object, tuple[int, int]] = field(default_factory=dict)
    _reads: dict[object, dict[int, int]] = field(default_factory=dict)

    def fence(self, member: int) -> None:
        clock = _joined(self._clocks.get(member, {}), self._seen.pop(member, {}))
        self._released[member] = clock
        self._clocks[member] = clock | {member: clock.get(member, 0) + 1}

    def count_stored(self, member: int, counter: int, value: int) -> None:
        self._announced.setdefault((member, counter), []).append((value, self._released.get(member, {})))

    def count_loaded(self, member: int, owner: int, counter: int, value: int) -> None:
        for count, clock in self._announced.get((owner, counter), []):
            if count <= value:
                self._seen[member] = _joined(self._seen.get(member, {}), clock)

    def written(self, member: int, place: object, what: str) -> None:
        if place in self._writes:
            self._check(member, *self._writes[place], f"{what} before the last write of {place} is known to be over")
        for reader, number in self._reads.pop(place, {}).items():
            self._check(member, reader, number, f"{what} while member {reader} may read {place}")
        self._writes[place] = member, self._now(member)

    def read(self, member: int, place: object, what: str) -> None:
        if place not in self._writes:
            self.races.append(f"{what}, and nobody has written {place}")
        else:
            self._check(member, *self._writes[place], f"{what} before {place} is known to be written")
        self._reads.setdefault(place, {})[member] = self._now(member)

    def _now(self, member: int) -> int:
        return self._clocks.setdefault(member, {member: 1}).setdefault(member, 1)

    def _check(self, member: int, other: int, number: int, problem: str) -> None:
        if member != other and self._clocks.get(member, {}).get(other, 0) < number:
            self.races.append(f"member {member} {problem}")
