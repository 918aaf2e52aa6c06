"""The random generators that shards draw from: the global ones of torch, numpy and `random`, and those a user names.

A loop may draw outside of shards, for example the order of the rows. A worker that joins, or makes a step again, has to
draw the same numbers as in an undisturbed training, so the states travel with those of the virtual workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from spark_elastic.data.order.permutation import derived_key
from spark_elastic.errors import UsageError

_put_back: dict[int, Callable[[], object]] = {}
"""By the id of a generator: sets its state after the last batch or at the last resume point, whichever came later.

After a batch the generators have just been seeded, so seeding them again is enough. Reading their states takes longer,
and is done at resume points alone.
"""


class RandomStates:
    """The states of the global generators and of the `named` ones, seeded for each shard; see `VirtualWorkers`."""

    def __init__(self, named: Iterable[Any] = ()) -> None:
        found = [torch.default_generator, np.random.mtrand._rand, random._inst, *named]
        self._generators = [(each, _kind_of(each)) for each in found]

    def __len__(self) -> int:
        return len(self._generators)

    def seed(self, seed: int, *, save: bool = False) -> None:
        """Seed each generator with another number, derived from `seed`; `save` the states for `put_back`."""
        for number, (generator, kind) in enumerate(self._generators):
            own = derived_key(seed, number)
            kind.seed(generator, own)
            if save:
                _put_back[id(generator)] = partial(kind.seed, generator, own)

    def encoded(self) -> list[Any]:
        """Save the present states for `put_back`, and return them for `load`: bytes and numbers alone."""
        states = [kind.read(generator) for generator, kind in self._generators]
        for (generator, kind), state in zip(self._generators, states, strict=True):
            _put_back[id(generator)] = partial(kind.write, generator, state)
        return states

    def load(self, states: Sequence[Any]) -> None:
        """Set the states to those that `encoded` has returned, in whatever process, and save them for `put_back`."""
        for (generator, kind), state in zip(self._generators, states, strict=True):
            kind.write(generator, state)
            _put_back[id(generator)] = partial(kind.write, generator, state)


def put_back() -> None:
    """Return all generators to the states that were saved last; do nothing if there are none."""
    for each in list(_put_back.values()):
        each()


def check_generators(generators: Iterable[Any]) -> None:
    """Raise UsageError if an object is not a random generator that can be seeded for each shard."""
    for each in generators:
        _kind_of(each)


# --- kinds --------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Functions that seed the random generators of one type, and read and set their states."""

    type: type
    seed: Callable[[Any, int], object]  # sets the state that follows from a seed of 64 bits
    read: Callable[[Any], Any]  # returns the state as bytes and numbers alone, which checkpoints of any kind can hold
    write: Callable[[Any, Any], object]  # sets such a state, in whatever process


def _kind_of(generator: Any) -> _Kind:
    for kind in _KINDS:
        if isinstance(generator, kind.type):
            return kind
    raise UsageError(
        f"generators has {generator!r}, which is no random generator; give torch.Generator, numpy.random.Generator, "
        "numpy.random.RandomState or random.Random objects"
    )


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
    bits = generator.bit_generator
    bits.state = type(bits)(seed).state


def _write_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = _decode(state)


def _seed_numpy_legacy(generator: np.random.RandomState, seed: int) -> None:
    fresh = type(generator._bit_generator)(seed).state
    generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def _write_python(generator: random.Random, state: Any) -> None:
    version, words, next_gauss = state
    generator.setstate((version, tuple(words), next_gauss))


_KINDS = (
    _Kind(
        torch.Generator,
        lambda generator, seed: generator.manual_seed(seed >> 1),
        lambda generator: generator.get_state().numpy().tobytes(),
        lambda generator, state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    _Kind(np.random.Generator, _seed_numpy, lambda generator: _encode(generator.bit_generator.state), _write_numpy),
    _Kind(
        np.random.RandomState,
        _seed_numpy_legacy,
        lambda generator: _encode(generator.get_state(legacy=False)),
        lambda generator, state: generator.set_state(_decode(state)),
    ),
    _Kind(
        random.Random,
        lambda generator, seed: generator.seed(seed),
        lambda generator: generator.getstate(),
        _write_python,
    ),
)
