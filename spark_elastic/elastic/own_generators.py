"""Random generators that a model, loss or other object has itself, seeded for each shard as the global ones are.

`find_generators` looks for them in attributes, in containers, and in what functions refer to: their closures, and the
global variables that they name. It enters the user's code alone: a library may have generators for other purposes, such
as the names of temporary files, which must differ between processes.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from spark_elastic.data.order.permutation import derived_key
from spark_elastic.errors import UsageError

log = logging.getLogger("spark_elastic.elastic.own_generators")

_STREAM = 0x6F776E
"""The part of their keys that tells their seeds from those of the global generators."""
_LIBRARIES = {"keras", "numpy", "spark_elastic", "tensorflow", "torch", *sys.stdlib_module_names} - {"__main__"}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, torch.Tensor, types.ModuleType)
"""Types in which there is no generator. A module is entered only through the functions and classes that are used."""

_MOST_ENTRIES = 10_000
"""Containers with more entries hold data, and take long to look into."""
_MOST_OBJECTS = 200_000
"""The most objects to look at, which takes about a second; the search then ends with a warning."""


class GeneratorKind(NamedTuple):
    """How generators of one type are seeded, and how their states are read and set.

    Attributes:
        type: the class of the generators.
        seed: sets the state that follows from a seed of 64 bits.
        read: returns the state as bytes and numbers alone, which checkpoints of any kind can hold.
        write: sets a state that `read` has returned, in whatever process.
        is_global: returns True for a generator that is seeded as one of the global ones.
    """

    type: type
    seed: Callable[[Any, int], object]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    is_global: Callable[[Any], bool]


class OwnGenerators:
    """The generators of some objects, found once, and the states to which they return after a failed step.

    Args:
        roots: the objects by the name that messages use for them.
        entered: classes of a framework whose instances are looked into, such as modules or layers.
        kinds: more kinds of generators than those of torch, numpy and Python.
    """

    def __init__(
        self, roots: Mapping[str, Any], entered: tuple[type, ...], kinds: Sequence[GeneratorKind] = ()
    ) -> None:
        self._entered, self._kinds = entered, (*kinds, *_KINDS)
        found = find_generators(roots, self._entered, self._kinds)
        self._found = dict(sorted(found.items()))  # the order must be the same in all processes
        self._put_back: dict[int, Callable[[], object]] = {}
        """By the id of a generator: sets the state that was saved last, by this object or another that has it too."""
        _instances.add(self)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def places(self) -> list[str]:
        """The places of the generators, in the order of their seeds; they must be the same in all processes."""
        return list(self._found)

    def seed(self, seed: int) -> None:
        """Seed each generator with another number, derived from `seed`."""
        for number, (generator, kind) in enumerate(self._found.values()):
            kind.seed(generator, derived_key(seed, _STREAM, number))

    def save_seeded(self, seed: int) -> None:
        """Save the present states for `put_back`: those that `seed` has just given for this seed."""
        for number, (generator, kind) in enumerate(self._found.values()):
            self._saved(generator, functools.partial(kind.seed, generator, derived_key(seed, _STREAM, number)))

    def put_back(self) -> None:
        """Return to the states that were saved last."""
        for put_back in self._put_back.values():
            put_back()

    def encoded(self) -> dict[str, Any]:
        """Save the present states, and return them by the places of the generators, for `load`."""
        states = {place: kind.read(generator) for place, (generator, kind) in self._found.items()}
        self._save(states)
        return states

    def load(self, states: Mapping[str, Any]) -> None:
        """Set the states to those that `encoded` has returned, in whatever process."""
        self._save(states)
        for place, (generator, kind) in self._found.items():
            if place in states:
                kind.write(generator, states[place])

    def _save(self, states: Mapping[str, Any]) -> None:
        for place, (generator, kind) in self._found.items():
            if place in states:
                self._saved(generator, functools.partial(kind.write, generator, states[place]))

    def _saved(self, generator: Any, put_back: Callable[[], object]) -> None:
        for each in _instances:
            if each is self or id(generator) in each._put_back:
                each._put_back[id(generator)] = put_back

    def check_none_was_made(self, roots: Mapping[str, Any]) -> None:
        """Check that a shard has made no generator, which would have drawn numbers that follow from no step.

        Raises:
            UsageError: There is a generator that was not there before.
        """
        known = {id(generator) for generator, _ in self._found.values()}
        for place, (generator, _) in find_generators(roots, self._entered, self._kinds).items():
            if id(generator) not in known:
                raise UsageError(
                    f"{place}, a {type(generator).__name__}, was made in the first step, in which it could not be "
                    "seeded for each shard, so the result would depend on the number of workers; make it before, for "
                    "example in __init__ of the model"
                )


_instances: weakref.WeakSet[OwnGenerators] = weakref.WeakSet()
"""All in this process: two may have the same generator."""


def find_generators(
    roots: Mapping[str, Any], entered: tuple[type, ...], kinds: Sequence[GeneratorKind]
) -> dict[str, tuple[Any, GeneratorKind]]:
    """Return the random generators that can be reached from some objects, by their places, as in "model.noise.rng".

    Args:
        roots: the objects by their names. The packages of their classes and functions count as the user's code.
        entered: classes whose instances are looked into wherever they were defined.
        kinds: the kinds of generators; the first that applies is used.
    """
    code = _UsersCode(roots)
    found: dict[str, tuple[Any, GeneratorKind]] = {}
    seen: dict[int, Any] = {}
    waiting = deque(roots.items())
    while waiting:
        place, value = waiting.popleft()
        # not isinstance, which asks a proxy for the class of what it stands for
        if issubclass(type(value), _PLAIN) or id(value) in seen:
            continue
        if len(seen) == _MOST_OBJECTS:
            log.warning(
                "%s refer to more than %d objects; random generators among the others are not seeded for each shard "
                "unless they are given to virtual_workers(generators=[...])",
                ", ".join(roots),
                _MOST_OBJECTS,
            )
            break
        seen[id(value)] = value
        kind = next((each for each in kinds if issubclass(type(value), each.type)), None)
        if kind is None:
            waiting.extend(_inside(place, value, entered, code))
        elif not kind.is_global(value):
            number, name = 1, place
            while name in found:  # closures of one function, for example
                number += 1
                name = f"{place} ({number})"
            found[name] = value, kind
    return found


class _UsersCode:
    """Tells code of the user's from code of libraries, by the packages of modules."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._packages = {"__main__": True}  # the file of a worker's is a library's
        for root in roots.values():
            for each in root if isinstance(root, (list, tuple)) else [root]:
                package = _package(each if issubclass(type(each), (type, types.FunctionType)) else type(each))
                self._packages[package] = package not in _LIBRARIES

    def __contains__(self, defined: Any) -> bool:
        """Return True for a function or class that was not defined in a library."""
        package = _package(defined)
        if package not in self._packages:
            self._packages[package] = package not in _LIBRARIES and not _is_installed(package)
        return self._packages[package]


def _package(defined: Any) -> str:
    return str(getattr(defined, "__module__", None) or "builtins").partition(".")[0]


def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any("site-packages" in str(place) or "dist-packages" in str(place) for place in places)


def _inside(place: str, value: Any, entered: tuple[type, ...], code: _UsersCode) -> Iterator[tuple[str, Any]]:
    """Return what to look into next, with its place."""
    kind = type(value)
    if issubclass(kind, dict):
        if dict.__len__(value) <= _MOST_ENTRIES:  # the methods of subclasses may do anything
            pairs = enumerate(list(dict.items(value)))
            yield from ((f"{place}[{_key(key, number)}]", each) for number, (key, each) in pairs)
    elif issubclass(kind, (list, tuple, deque)):
        base = next(each for each in (list, tuple, deque) if issubclass(kind, each))
        if base.__len__(value) <= _MOST_ENTRIES:
            yield from ((f"{place}[{number}]", each) for number, each in enumerate(base.__iter__(value)))
    elif issubclass(kind, functools.partial):
        yield from ((place, each) for each in (value.func, value.args, value.keywords))
    elif issubclass(kind, types.MethodType):
        yield from ((place, each) for each in (value.__self__, value.__func__))
    elif issubclass(kind, types.BuiltinMethodType):
        yield place, value.__self__
    elif issubclass(kind, (staticmethod, classmethod)):
        yield place, value.__func__
    elif issubclass(kind, property):
        yield place, value.fget
    elif issubclass(kind, types.FunctionType):
        if value in code:
            yield from _of_function(place, value)
        yield f"{place}.__wrapped__", getattr(value, "__wrapped__", None)
    elif issubclass(kind, type):
        if value in code:
            yield from ((f"{place}.{name}", each) for name, each in vars(value).items() if name != "__dict__")
            yield from ((place, each) for each in value.__bases__)
    elif issubclass(kind, (*entered, types.SimpleNamespace)) or kind in code:
        yield from ((f"{place}.{name}", each) for name, each in _attributes(value).items())
        yield place, kind
    elif not issubclass(kind, weakref.ProxyTypes):
        yield f"{place}.__wrapped__", getattr(value, "__dict__", {}).get("__wrapped__")  # such as a tf.function


def _key(key: Any, number: int) -> str:
    """Return a name for the key of a dictionary that is the same in all processes: `repr` may have an address."""
    return repr(key) if issubclass(type(key), (str, int, bytes)) or key is None else f"#{number}"


def _attributes(value: Any) -> dict[str, Any]:
    attributes = {
        name: getattr(value, name)
        for base in type(value).__mro__
        for name in _names(base.__dict__.get("__slots__", ()))
        if not name.startswith("__") and hasattr(value, name)
    }
    attributes |= getattr(value, "__dict__", {})
    return {**attributes.pop("_modules", {}), **attributes} if issubclass(type(value), torch.nn.Module) else attributes


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_function(place: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Return what a function refers to: the variables of its closure, its defaults, and the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name} of {function.__qualname__}", cell.cell_contents
        except ValueError:  # not assigned yet
            pass
    yield place, function.__defaults__
    yield place, function.__kwdefaults__
    for name in sorted(_named(function.__code__)):
        yield f"{name} of {function.__module__}", function.__globals__.get(name)


def _named(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in some code, and in the functions that it makes."""
    inner = (_named(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)


# --- kinds --------------------------------------------------------------------------------------------


def _of_bits(bits: Any, seed: int) -> Any:
    return type(bits)(seed).state


def _encode(state: Any) -> Any:
    """Return numpy's state with bytes in place of arrays."""
    if isinstance(state, Mapping):
        return {str(name): _encode(each) for name, each in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "bytes": state.tobytes()}
    return state.item() if isinstance(state, np.generic) else state


def _decode(encoded: Any) -> Any:
    if not isinstance(encoded, Mapping):
        return encoded
    if set(encoded) == {"dtype", "bytes"}:
        return np.frombuffer(encoded["bytes"], encoded["dtype"])
    return {name: _decode(each) for name, each in encoded.items()}


def _seed_numpy(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = _of_bits(generator.bit_generator, seed)


def _write_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = _decode(state)


def _seed_numpy_legacy(generator: np.random.RandomState, seed: int) -> None:
    bits = generator._bit_generator
    generator.set_state({**_of_bits(bits, seed), "has_gauss": 0, "gauss": 0.0})


def _write_python(generator: random.Random, state: Any) -> None:
    version, words, next_gauss = state
    generator.setstate((version, tuple(words), next_gauss))


def _write_torch(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_KINDS = (
    GeneratorKind(
        torch.Generator,
        lambda generator, seed: generator.manual_seed(seed >> 1),
        lambda generator: generator.get_state().numpy().tobytes(),
        _write_torch,
        lambda generator: generator is torch.default_generator,
    ),
    GeneratorKind(
        np.random.Generator,
        _seed_numpy,
        lambda generator: _encode(generator.bit_generator.state),
        _write_numpy,
        lambda generator: False,
    ),
    GeneratorKind(
        np.random.RandomState,
        _seed_numpy_legacy,
        lambda generator: _encode(generator.get_state(legacy=False)),
        lambda generator, state: generator.set_state(_decode(state)),
        lambda generator: generator is np.random.mtrand._rand,
    ),
    GeneratorKind(
        random.Random,
        lambda generator, seed: generator.seed(seed),
        lambda generator: generator.getstate(),
        _write_python,
        lambda generator: generator is random._inst or isinstance(generator, random.SystemRandom),
    ),
)
