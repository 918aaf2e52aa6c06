"""Plain values of a training loop that belong to the step in which they were changed, so that a step can be undone.

A loop may count before a step or after it. When the reduction of a step has failed, all is as at the entry of that
step, and the loop is called again from its top. So what the loop does between its top and its first step will be done
again, and has to be undone; everything else stays. What that is, is learnt each time that the loop is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

MISSING = object()
Learnt = tuple[dict[str, tuple[int, frozenset[Hashable]]], dict[str, Any], dict[str, frozenset[Hashable]]]


class PlainValues:
    """Follow the plain values of one elastic loop, from its call to its first step, and from step to step.

    Values that are assigned (numbers, strings) are undone assignment by assignment: as many as the loop made before
    its first step, of those since the last step, and only those made at the same places of the program. Where a call
    begins at the end of an epoch, the end of the epoch comes before its first step; elsewhere it follows a step.

    A place may come after the step in one call and before the first step in another, if an iteration there makes no
    step. Assignments at such a place cannot be undone, and `undone` returns None.

    Values that are changed in place (lists, dictionaries) return to their copy of the last step's entry, if they have
    changed since then in the way in which they did before the first step.

    Args:
        copy: makes a copy that later changes do not reach.
    """

    def __init__(self, copy: Callable[[Any], Any]) -> None:
        self._copy = copy
        self._begun: dict[str, Any] | None = None
        """Copies of all values when the loop was called; None: its first step has come."""
        self._assigned: dict[str, tuple[int, frozenset[Hashable]]] = {}
        """How many assignments the loop makes before its first step, and where, for names where it makes any."""
        self._in_place: dict[str, Any] = {}
        """By name, how the value changes in place before the first step."""
        self._trails: dict[str, list[tuple[Hashable, Any]]] = {}
        """By name, where it was assigned since the last step, and what it was before."""
        self._at_entry: dict[str, Any] = {}
        """Copies at the entry of the last step that was applied, or of the one that is being applied."""
        self._next_entry: dict[str, Any] = {}
        self._trails_at_entry: dict[str, int] = {}
        """How long each trail was at the entry of the step that is being applied."""
        self._unsettled: set[str] = set()
        """Names of which it is not known yet in this call where they are assigned between two steps."""
        self._after: dict[str, frozenset[Hashable]] = {}
        """By name, places that were seen to come after a step, in some call."""
        self._before: dict[str, Counter[Hashable]] = {}
        """By name, how often each place came before the first step of this call."""
        self._followed = True

    def begin(self, values: Mapping[str, Any]) -> None:
        """The loop is called; `values` are copies."""
        self._begun = dict(values)
        self._trails = {name: [] for name in values}
        self._unsettled = set(values)
        self._before = {}
        self._at_entry, self._trails_at_entry = {}, {}
        self._followed = True

    @property
    def awaits_step(self) -> bool:
        """Whether no step has come since `begin`."""
        return self._begun is not None

    def end(self) -> None:
        """Follow nothing from now on: the loop is over, or callbacks of this package do the counting."""
        self._begun, self._trails = None, {}
        self._followed = False

    def follows(self, name: str) -> bool:
        """Whether assignments of this value are to be told."""
        return name in self._trails

    def assigned(self, name: str, before: Any, after: Any, place: Hashable = None) -> None:
        """A value was set; `place`: where in the program, the same on all members."""
        if before is not after and not same(before, after):
            self._trails[name].append((place, self._copy(before)))

    def entering(self, value: Callable[[str], Any]) -> None:
        """A step is entered: its gradients are reduced now, or just have been."""
        if self._begun is not None:
            self._learn(self._begun, value)
            self._begun = None
        elif self._unsettled:
            self._look_at_places()
        self._next_entry = {name: self._copy(value(name)) for name in self._in_place}
        self._trails_at_entry = {name: len(trail) for name, trail in self._trails.items()}

    def stepped(self) -> None:
        """The step was applied just now."""
        self._at_entry = self._next_entry
        for trail in self._trails.values():
            trail.clear()

    def stepped_meanwhile(self) -> None:
        """Take note that the step entered last has been applied, at some time since then."""
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
        """Note which places come after a step: at which a value is assigned between two, but not as often before the
        first one. A trail with several places may hold the end of an epoch, which belongs to either step.
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
        """What a worker that joins in the middle of a loop cannot see; for its `learn_from`."""
        return self._assigned, self._in_place, self._after

    def learn_from(self, learnt: Learnt) -> None:
        assigned, in_place, after = learnt
        for name, (count, places) in assigned.items():
            self._learn_assigned(name, count, places)
        for name, places in after.items():
            self._after[name] = self._after.get(name, frozenset()) | places
        self._in_place = {**in_place, **self._in_place}

    def undone(self, value: Callable[[str], Any]) -> dict[str, Any] | None:
        """Return the values to set, so that the loop can be called for the step whose reduction has failed.

        None: it cannot be told what belongs to that step.
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


class Opaque:
    """A difference that is like no other."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def difference(before: Any, after: Any) -> Any:
    """Return how a value has changed, so that two changes of the same kind are equal: by how much a whole number has
    grown, how many items a list has got at its end, and so on for each key of a dictionary. None: not at all."""
    try:
        return _difference(before, after)
    except RecursionError:  # of a value that holds itself
        return Opaque()


def _difference(before: Any, after: Any) -> Any:
    if same(before, after):
        return None
    if type(before) is int and type(after) is int:
        return after - before
    if isinstance(before, list) and isinstance(after, list) and len(after) >= len(before):
        if same(before, after[: len(before)]):
            return "longer", len(after) - len(before)
        if len(before) == len(after):
            return "items", [_difference(a, b) for a, b in zip(before, after, strict=True)]
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return "keys", {key: _difference(before[key], after[key]) for key in before}
    return Opaque()


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, also where `==` answers with an array or not at all, or they hold themselves.

    Objects without an `==` of their own are equal if they are of one type and would be pickled alike.
    """
    return _same(one, other, {})


_Seen = dict[tuple[int, int], tuple[Any, Any]]
"""By the ids of two values: themselves, so that no others get these ids."""


def _same(one: Any, other: Any, seen: _Seen) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    kind: Any = type(one)
    is_plain = kind.__eq__ is object.__eq__
    if is_plain or isinstance(one, (dict, list, tuple)):
        if (id(one), id(other)) in seen:
            return True  # as far as is known: they are compared further up, or were equal
        seen[id(one), id(other)] = one, other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], seen) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, seen) for a, b in zip(one, other, strict=True))
    try:
        if is_plain:
            return _same(_parts(one), _parts(other), seen)
        answer = one == other
        if isinstance(answer, bool):
            return answer or (one != one and other != other)
        return bool(answer.all()) if one.shape == other.shape else False
    except Exception:
        return False


def _parts(value: Any) -> Any:
    """What the value is made of. Raises: what the value raises: it cannot be pickled."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return reduced
    return [*reduced[:3], *(list(items) for items in reduced[3:5] if items is not None)]
