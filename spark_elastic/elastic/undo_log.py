"""An undo log for plain values: takes back the changes that belong to a failed step.

A loop may count before a step or after it. When the reduction of a step has failed, the tensors are as they were at the
entry of that step, and the loop's function is called again from its top. So the changes that the loop makes between its
top and its first step will be made again and have to be undone; all others stay. The log learns which those are each
time the function is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from spark_elastic.elastic.plain_values import difference, independent_copy, same

MISSING = object()
Learnt = tuple[dict[str, tuple[int, frozenset[Hashable]]], dict[str, Any], dict[str, frozenset[Hashable]]]


class UndoLog:
    """Follow the plain values of a loop from the call of its function to the first step, and from step to step.

    Assigned values (numbers, strings) are undone assignment by assignment: as many as the loop made before its first
    step, of those since the last step, and only those made at the same places of the program. When a call begins at
    the end of an epoch, the end of the epoch comes before its first step; otherwise it follows a step.

    A place may come after the step in one call and before the first step in another, if an iteration there makes no
    step. Assignments at such a place cannot be undone, and `undone` returns None.

    Values that are changed in place (lists, dictionaries) return to their copy of the last step's entry, if they have
    changed since then in the way in which they did before the first step.
    """

    def __init__(self) -> None:
        self._begun: dict[str, Any] | None = None
        """Copies of all values when the function was called; None once its first step has come."""
        self._assigned: dict[str, tuple[int, frozenset[Hashable]]] = {}
        """By name, number and places of the assignments that the loop makes before its first step."""
        self._in_place: dict[str, Any] = {}
        """By name, the `difference` that the loop makes in place before its first step."""
        self._trails: dict[str, list[tuple[Hashable, Any]]] = {}
        """By name, the place of each assignment since the last step, and the value before it."""
        self._at_entry: dict[str, Any] = {}
        """Copies at the entry of the last step that was applied, or of the one that is being applied."""
        self._next_entry: dict[str, Any] = {}
        self._trails_at_entry: dict[str, int] = {}
        """The length of each trail at the entry of the step that is being applied."""
        self._unsettled: set[str] = set()
        """Names whose places of assignment between two steps are not known yet in this call."""
        self._after: dict[str, frozenset[Hashable]] = {}
        """By name, places that were seen to come after a step, in any call."""
        self._before: dict[str, Counter[Hashable]] = {}
        """By name, the number of assignments at each place before the first step of this call."""
        self._followed = True

    def begin(self, values: Mapping[str, Any]) -> None:
        """Start following `values`, which are copies: the loop's function is about to be called."""
        self._begun = dict(values)
        self._trails = {name: [] for name in values}
        self._unsettled = set(values)
        self._before = {}
        self._at_entry, self._trails_at_entry = {}, {}
        self._followed = True

    @property
    def awaits_step(self) -> bool:
        """True if no step has come since `begin`."""
        return self._begun is not None

    def end(self) -> None:
        """Stop following: the loop is over, or callbacks of this package do the counting."""
        self._begun, self._trails = None, {}
        self._followed = False

    def follows(self, name: str) -> bool:
        return name in self._trails

    def assigned(self, name: str, before: Any, after: Any, place: Hashable = None) -> None:
        """Note an assignment; `place` is the line of the program, the same on all members."""
        if before is not after and not same(before, after):
            self._trails[name].append((place, independent_copy(before)))

    def entering(self, value: Callable[[str], Any]) -> None:
        """Note that a step is entered: its gradients are being reduced, or just have been.

        Args:
            value: Returns the present value of a name.
        """
        if self._begun is not None:
            self._learn(self._begun, value)
            self._begun = None
        elif self._unsettled:
            self._look_at_places()
        self._next_entry = {name: independent_copy(value(name)) for name in self._in_place}
        self._trails_at_entry = {name: len(trail) for name, trail in self._trails.items()}

    def stepped(self) -> None:
        """Note that the step was applied just now."""
        self._at_entry = self._next_entry
        for trail in self._trails.values():
            trail.clear()

    def stepped_meanwhile(self) -> None:
        """Note that the step entered last was applied at some time since then."""
        self._at_entry = self._next_entry
        for name, trail in self._trails.items():
            del trail[: self._trails_at_entry.get(name, 0)]
        self._trails_at_entry = {}

    def _learn(self, begun: Mapping[str, Any], value: Callable[[str], Any]) -> None:
        for name, before in begun.items():
            now, trail = value(name), self._trails[name]
            if same(before, now):
                continue
            if trail:
                self._before[name] = Counter(place for place, _ in trail)
                self._learn_assigned(name, len(trail), frozenset(self._before[name]))
            else:
                self._in_place[name] = difference(before, now)
        self._trails = {name: [] for name in begun}

    def _look_at_places(self) -> None:
        """Note which places come after a step: a value is assigned there between two steps more often than before.

        A trail with several places may hold the end of an epoch, which belongs to either step.
        """
        for name in list(self._unsettled):
            places = {place for place, _ in self._trails[name]}
            if len(places) != 1:
                continue
            self._unsettled.discard(name)
            if self._before.get(name, Counter())[self._trails[name][0][0]] != len(self._trails[name]):
                self._after[name] = self._after.get(name, frozenset()) | places
            if name not in self._assigned:
                del self._trails[name]

    def _learn_assigned(self, name: str, count: int, places: frozenset[Hashable]) -> None:
        known, known_places = self._assigned.get(name, (0, frozenset()))
        self._assigned[name] = max(count, known), places | known_places

    @property
    def learnt(self) -> Learnt:
        """Facts that a worker cannot see which joins in the middle of a loop; for its `learn_from`."""
        return self._assigned, self._in_place, self._after

    def learn_from(self, learnt: Learnt) -> None:
        assigned, in_place, after = learnt
        for name, (count, places) in assigned.items():
            self._learn_assigned(name, count, places)
        for name, places in after.items():
            self._after[name] = self._after.get(name, frozenset()) | places
        self._in_place = {**in_place, **self._in_place}

    def undone(self, value: Callable[[str], Any]) -> dict[str, Any] | None:
        """Return the values to set before the function is called for the step whose reduction has failed.

        Args:
            value: Returns the present value of a name.

        Returns:
            Values by name; None if it is unknown which changes belong to that step.
        """
        out: dict[str, Any] = {}
        if not self._followed:
            return out
        for name, trail in self._trails.items():
            count, places = self._assigned.get(name, (0, frozenset()))
            for place, before in reversed(trail[-count:] if count else []):
                if place not in places:
                    break
                if place in self._after.get(name, ()):
                    return None
                out[name] = before
        for name, usual in self._in_place.items():
            before, now = self._at_entry.get(name, MISSING), value(name)
            if before is MISSING:
                return None
            if same(before, now):
                continue
            if difference(before, now) != usual:
                return None
            out[name] = before
        return out


class CountingProbe:
    """Finds out if a loop makes several steps before it counts: no plain value changes between its first two steps.

    If a reduction of such a loop fails, it may be that of a second step, with the first applied but not counted.

    Attributes:
        found: The loop was seen to make several steps before it counts. Stays known for later calls.
    """

    def __init__(self) -> None:
        self.found = False
        self._first: Mapping[str, Any] | None = None
        self._unchanged = False
        self.settled = False
        """True once the steps of a whole round, one of each optimizer that is used, were compared."""

    def begin(self) -> None:
        """Start anew: the loop's function is called."""
        self._first, self._unchanged, self.settled = None, False, False

    @property
    def started(self) -> bool:
        return self._first is not None

    def start(self, counts: Mapping[str, Any]) -> None:
        """Note the values at the entry of the first step."""
        self._first = counts

    def compare(self, counts: Mapping[str, Any]) -> None:
        """Note the values at a later step of the first round, or at its failure."""
        if self._first is not None and not self.settled:
            self._unchanged = bool(self._first) and same(self._first, counts)

    def settle(self) -> None:
        """Close the first round with what was compared last."""
        self.found |= self._unchanged
        self._unchanged, self.settled = False, True

    @property
    def several_steps(self) -> bool:
        """True if steps may have been made that the loop has not counted."""
        return self.found or self._unchanged
