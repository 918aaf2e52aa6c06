"""Plain Python values of a training loop, such as its counters: copy, compare, and undo the changes of a failed step.

A loop may count before a step or after it. When the reduction of a step has failed, the tensors are as they were at the
entry of that step, and the loop's function is called again from its top. So the changes that the loop makes between its
top and its first step will be made again and have to be undone; all others stay. `UndoLog` learns which those are each
time the function is called.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

_ATOMS: frozenset[type] = frozenset({int, float, bool, str, bytes, complex, type(None)})


class PlainAttributes:
    """The plain attributes of an object, saved and restored together, as independent copies."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self.names = list(names)
        self._owner = owner
        self._saved: dict[str, Any] = {}

    def copies(self) -> dict[str, Any]:
        values: dict[str, Any] = independent_copy({name: getattr(self._owner, name) for name in self.names})
        return values

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set attributes of the owner to copies of these values."""
        for name, value in independent_copy(dict(values)).items():
            setattr(self._owner, name, value)

    def save(self) -> None:
        self._saved = self.copies()

    def restore(self) -> None:
        self.assign(self._saved)

    def take_up(self, kept: PlainAttributes) -> None:
        """Set the attributes that `kept` has as well to the values of the owner of `kept`."""
        self.assign({name: getattr(kept._owner, name) for name in self.names if name in kept.names})

    def remove(self, name: str) -> None:
        self.names.remove(name)
        self._saved.pop(name, None)


def independent_copy(value: Any) -> Any:
    """Copy a value so that later changes to it do not reach the copy; fast for numbers, strings, lists and the like.

    An object that occurs several times in `value` is one object in the copy as well. An object that cannot be copied
    is returned itself.
    """
    return _copied(value, {})


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Copy a value.

    Args:
        value: The value.
        known: The copies made so far, by the id of the original object, as `copy.deepcopy` keeps them.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in known:
        return known[id(value)]
    out: Any
    if kind is list:
        out = known[id(value)] = []
        out.extend(value if _ATOMS.issuperset(map(type, value)) else [_copied(item, known) for item in value])
        return out
    if kind is dict:
        out = known[id(value)] = {}
        out.update({key: _copied(item, known) for key, item in value.items()})
        return out
    if kind is tuple or kind is set:
        out = kind(value) if _ATOMS.issuperset(map(type, value)) else kind([_copied(item, known) for item in value])
        return known.setdefault(id(value), out)
    before = len(known)
    try:
        return copy.deepcopy(value, known)
    except Exception:  # a lock, a file, a generator: shared, as with Horovod
        while len(known) > before:
            known.popitem()  # copies that are not complete
        known[id(value)] = value
        return value


class Opaque:
    """A difference that does not equal any other, itself included."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def difference(before: Any, after: Any) -> Any:
    """Describe how a value has changed, so that two changes of the same kind compare equal; None: it has not.

    An integer's change is the amount, a list's the number of appended items or the change of each item, a dictionary's
    the change of each value.
    """
    try:
        return _difference(before, after)
    except RecursionError:  # of a value that contains itself
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
    """Return True if two values are equal, also where `==` returns an array or raises, or a value contains itself.

    Objects without an `==` of their own are equal if they have one type and would be pickled alike.
    """
    return _same(one, other, {})


_Seen = dict[tuple[int, int], tuple[Any, Any]]
"""Pairs of values that were compared, by their ids; referring to them here keeps their ids from being used again."""


def _same(one: Any, other: Any, seen: _Seen) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    kind: Any = type(one)
    is_plain = kind.__eq__ is object.__eq__
    if is_plain or isinstance(one, (dict, list, tuple)):
        if (id(one), id(other)) in seen:
            return True  # an outer call compares this pair just now, or it was equal
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
    """Return what pickle would store of a value; raise the value's own exception if it cannot be pickled."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return reduced
    return [*reduced[:3], *(list(items) for items in reduced[3:5] if items is not None)]


MISSING = object()
Learnt = tuple[dict[str, tuple[int, frozenset[Hashable]]], dict[str, Any], dict[str, frozenset[Hashable]]]


class UndoLog:
    """Records how a loop changes its plain values before a step, and finds the values to return to if the step fails.

    Assigned values (numbers, strings) are undone assignment by assignment: of those since the last step, as many as the
    loop made before its first step, and only those made on the same lines of the program, called places here. If a call
    of the function begins at the end of an epoch, the end of the epoch comes before its first step; otherwise it comes
    after a step.

    A place may come after the step in one call and before the first step in another, if an iteration there makes no
    step. Assignments at such a place cannot be undone, and `undone` returns None.

    Values that are changed in place (lists, dictionaries) return to the copy made when the last step was entered, if
    they have changed since then in the way in which they did before the first step.
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
        """False once `end` was called: the loop's callbacks undo its changes, not this log."""

    def begin(self, values: Mapping[str, Any]) -> None:
        """Start recording changes of `values`, which are copies: the loop's function is about to be called."""
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
        """Stop recording: the loop is over, or callbacks of this package count its batches and epochs."""
        self._begun, self._trails = None, {}
        self._followed = False

    def follows(self, name: str) -> bool:
        return name in self._trails

    def assigned(self, name: str, before: Any, after: Any, place: Hashable = None) -> None:
        """Record an assignment made at `place`, a line of the program, which is the same on all members."""
        if before is not after and not same(before, after):
            self._trails[name].append((place, independent_copy(before)))

    def entering(self, value: Callable[[str], Any]) -> None:
        """Record the entry of a step, whose gradients are being reduced or just have been.

        Args:
            value: A function that returns the present value of a name.
        """
        if self._begun is not None:
            self._learn(self._begun, value)
            self._begun = None
        elif self._unsettled:
            self._look_at_places()
        self._next_entry = {name: independent_copy(value(name)) for name in self._in_place}
        self._trails_at_entry = {name: len(trail) for name, trail in self._trails.items()}

    def stepped(self) -> None:
        """Record that the step was applied just now."""
        self._at_entry = self._next_entry
        for trail in self._trails.values():
            trail.clear()

    def stepped_meanwhile(self) -> None:
        """Record that the step entered last was applied at some time after its entry."""
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
        """Learn which places come after a step: there, a value is assigned more often between steps than before one.

        Assignments at several places may include those of the end of an epoch, which can belong to either step.
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
        """What was learnt, for `learn_from` of a worker that joins in the middle of the loop."""
        return self._assigned, self._in_place, self._after

    def learn_from(self, learnt: Learnt) -> None:
        assigned, in_place, after = learnt
        for name, (count, places) in assigned.items():
            self._learn_assigned(name, count, places)
        for name, places in after.items():
            self._after[name] = self._after.get(name, frozenset()) | places
        self._in_place = {**in_place, **self._in_place}

    def undone(self, value: Callable[[str], Any]) -> dict[str, Any] | None:
        """Return the values to set, by name, before the function is called again for a step whose reduction failed.

        Returns None if it is unknown which changes belong to that step.

        Args:
            value: A function that returns the present value of a name.
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
    """Finds out if a loop counts several steps at once: no plain value changes between its first two steps.

    If a reduction of such a loop fails, it may be that of a second step, with the first applied but not counted.
    """

    def __init__(self) -> None:
        self.found = False
        """The loop was seen to count several steps at once, in this or an earlier call of its function."""
        self.begin()

    def begin(self) -> None:
        """Start anew: the loop's function is called."""
        self._first: Mapping[str, Any] | None = None
        self._unchanged = False
        self.settled = False
        """True once the steps of a whole round, one of each optimizer that is used, were compared."""

    @property
    def started(self) -> bool:
        return self._first is not None

    def start(self, counts: Mapping[str, Any]) -> None:
        """Record the values at the entry of the first step."""
        self._first = counts

    def compare(self, counts: Mapping[str, Any]) -> None:
        """Compare the values at a later step of the first round, or at its failure, with those of its first step."""
        if self._first is not None and not self.settled:
            self._unchanged = bool(self._first) and same(self._first, counts)

    def settle(self) -> None:
        """End the first round; the last comparison decides."""
        self.found |= self._unchanged
        self._unchanged, self.settled = False, True

    @property
    def several_steps(self) -> bool:
        """True if steps may have been made that the loop has not counted."""
        return self.found or self._unchanged
