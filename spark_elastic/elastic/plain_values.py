"""Plain Python values of a training loop, such as its counters: copy them and restore them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from spark_elastic import clock
from spark_elastic.errors import NotPicklableError, SparkElasticError, UsageError

log = logging.getLogger("spark_elastic.elastic.state")

SLOW_COPY_S = 0.5
"""A value that takes longer to copy is named in a warning."""

_ATOMS: frozenset[type] = frozenset({int, float, bool, str, bytes, complex, type(None)})


def is_atom(value: Any) -> bool:
    """Return True for a number, a string, bytes or None, but not for objects of classes derived from these."""
    return type(value) in _ATOMS


class PlainAttributes:
    """The plain attributes of an object, those added later too, saved and restored together as independent copies."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self.names = list(names)
        self._added: set[str] = set()
        self._owner = owner
        self._saved: dict[str, Any] = {}
        self.said_slow = False
        """A warning has named a value that takes long to copy."""

    def is_new(self, name: str) -> bool:
        """Return True if an attribute of this name would be added: it is public, and no part of the owner's class."""
        return not name.startswith("_") and name not in vars(self._owner) and not hasattr(type(self._owner), name)

    def add(self, name: str, value: Any) -> None:
        """Keep an attribute that is about to be set. Raise NotPicklableError if the value cannot be pickled."""
        check_picklable({name: value}, "let its name begin with an underscore to keep it out of the state")
        self._register(name)

    def copies(self) -> dict[str, Any]:
        present = {name: getattr(self._owner, name) for name in self.names if hasattr(self._owner, name)}
        began = clock.monotonic()
        values: dict[str, Any] = independent_copy(present)
        if clock.monotonic() - began > SLOW_COPY_S and not self.said_slow:
            seconds = {}
            for name, value in present.items():
                began = clock.monotonic()
                independent_copy(value)
                seconds[name] = clock.monotonic() - began
            slowest = max(seconds, key=lambda name: seconds[name])
            self.say_slow(slowest, present[slowest], seconds[slowest])
        return values

    def say_slow(self, name: str, value: Any, seconds: float) -> None:
        """Warn, once for a state, that a value of it takes so long to copy."""
        self.said_slow = True
        log.warning(
            "%s of the state, a %s, takes %.1f s to copy, at each commit and check; keep what does not change outside "
            "of the state",
            name,
            type(value).__name__,
            seconds,
        )

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set attributes of the owner to copies of these values; remove added ones that have none."""
        for name in self._added - values.keys():
            self.remove(name)
            vars(self._owner).pop(name, None)
        for name, value in independent_copy(dict(values)).items():
            if name not in self.names:
                self._register(name)
            setattr(self._owner, name, value)

    def save(self) -> None:
        self._saved = self.copies()

    def restore(self) -> None:
        self.assign(self._saved)

    def copy_from(self, kept: PlainAttributes) -> None:
        """Set the attributes that `kept` has as well to the values of the owner of `kept`."""
        both = [name for name in kept.names if name in self.names or name in kept._added]
        self.assign({name: getattr(kept._owner, name) for name in both})

    def remove(self, name: str) -> None:
        self.names.remove(name)
        self._added.discard(name)
        self._saved.pop(name, None)

    def _register(self, name: str) -> None:
        self.names.append(name)
        self._added.add(name)


def check_names(owner: object, names: Iterable[str]) -> None:
    """Raise UsageError if a value of a state has the name of a method, a property or a part of the state."""
    kind = type(owner)
    own = {name: getattr(kind, name) for name in dir(kind)}
    methods = [n for n, each in own.items() if callable(each) or (isinstance(each, property) and each.fset is None)]
    reserved = {*methods, *vars(owner), "_frontend", "_handlers", "_mark", "_plain", "_root_unbuilt", "_steps"}
    for name in names:
        if name in reserved:
            public = ", ".join(sorted(each for each in methods if not each.startswith("_")))
            raise UsageError(
                f"{name} cannot be the name of a value of a {kind.__name__}, which uses it itself; taken are {public}, "
                "and names of its own that begin with an underscore"
            )


def check_picklable(values: Mapping[str, Any], remedy: str) -> None:
    """Raise NotPicklableError if a value cannot be pickled; the error names it, and ends with the remedy."""
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise NotPicklableError(
                f"{name} cannot be kept by the state: a {type(value).__name__} cannot be pickled "
                f"({type(error).__name__}: {error}); {remedy}"
            ) from error


@contextmanager
def unpicklable_named(values: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Name the value that could not be pickled if an error of pickling leaves this context."""
    try:
        yield
    except SparkElasticError:
        raise
    except Exception:
        check_picklable(
            values(), "give the state what can be sent to other workers, and make this value on each worker"
        )
        raise


def check_same_names(own: Iterable[str], other: Iterable[str]) -> None:
    """Raise ValueError, naming the differences, if a state does not have the values of another one."""
    if different := sorted(set(own) ^ set(other)):
        raise ValueError(f"only one of the two has {', '.join(different)}")


def independent_copy(value: Any) -> Any:
    """Copy a value so that later changes to it do not reach the copy; fast for numbers, strings, lists and the like.

    An object that occurs several times in `value` is one object in the copy as well. An object that cannot be copied
    is returned itself. A tensor that autograd has computed is detached.
    """
    return _copied(value, {})


def _copied(value: Any, known: dict[int, Any], whole: bool = False) -> Any:
    """Copy a value; `known` has the copies made so far, by the id of the original, as `copy.deepcopy` keeps them.

    If a part cannot be copied, it is shared, or, with `whole`, an exception is raised.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in known:
        return known[id(value)]
    out: Any
    if kind is list:
        out = known[id(value)] = []
        out.extend(value if _ATOMS.issuperset(map(type, value)) else [_copied(item, known, whole) for item in value])
        return out
    if kind is dict:
        out = known[id(value)] = {}
        out.update({key: _copied(item, known, whole) for key, item in value.items()})
        return out
    if kind is tuple or kind is set:
        atoms = _ATOMS.issuperset(map(type, value))
        out = kind(value) if atoms else kind([_copied(item, known, whole) for item in value])
        return known.setdefault(id(value), out)
    if isinstance(value, torch.Tensor) and not value.is_leaf:  # a sum of losses, say, which deepcopy refuses
        return known.setdefault(id(value), value.detach().clone())
    before = len(known)
    for copied in (copy.deepcopy, _copied_by_attributes):
        try:
            return copied(value, known)
        except Exception:
            while len(known) > before:
                known.popitem()  # copies that are not complete
    if whole:
        raise TypeError(f"a {kind.__qualname__} cannot be copied")
    known[id(value)] = value  # a lock, a file, a generator: shared, as with Horovod
    return value


def _copied_by_attributes(value: Any, known: dict[int, Any]) -> Any:
    """Copy an object of a class without methods for copying, which has tensors that deepcopy refuses."""
    kind = type(value)
    own = ("__deepcopy__", "__copy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__new__")
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in own):
        raise TypeError(f"{kind.__qualname__} is not a plain class")
    out = known[id(value)] = object.__new__(kind)
    out.__dict__.update({name: _copied(part, known, whole=True) for name, part in value.__dict__.items()})
    return out
