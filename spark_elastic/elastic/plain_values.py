"""Plain Python values that a training loop counts with: copied, compared, and kept as attributes of a state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

_ATOMS: frozenset[type] = frozenset({int, float, bool, str, bytes, complex, type(None)})


class PlainAttributes:
    """The plain attributes of an object, saved and restored together.

    Mutable values are copied, so that changing one in place does not change the copy.

    Attributes:
        names: The attributes that are saved.
    """

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
        """Set the attributes that both objects have to the values of the other object."""
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
    """Copy a value; `known` holds the copies made so far by the id of their originals, as in `copy.deepcopy`."""
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
    """A difference that equals no other."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def difference(before: Any, after: Any) -> Any:
    """Describe how a value has changed, so that two changes of the same kind compare equal.

    Returns:
        The amount by which an integer has grown, the number of items appended to a list, and the same for each key of
        a dictionary; None if nothing has changed.
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
"""Pairs of values by their ids. The values are kept so that no other object gets these ids meanwhile."""


def _same(one: Any, other: Any, seen: _Seen) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    kind: Any = type(one)
    is_plain = kind.__eq__ is object.__eq__
    if is_plain or isinstance(one, (dict, list, tuple)):
        if (id(one), id(other)) in seen:
            return True  # as far as is known: this pair is being compared further up, or was equal
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
    """Return the parts that the value would be pickled from.

    Raises:
        Exception: Raised by the value, which cannot be pickled.
    """
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return reduced
    return [*reduced[:3], *(list(items) for items in reduced[3:5] if items is not None)]
