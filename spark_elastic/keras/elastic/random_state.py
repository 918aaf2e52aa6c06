"""The random generators that a step of Keras on TensorFlow may draw from, seeded anew for each shard of a batch.

They are those of the model's layers (`SeedGenerator`), the global ones of Keras and TensorFlow, numpy's and Python's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: no public function returns Keras' global generator, or sets TensorFlow's seed without dropping all kernels,
# which takes as long as many steps.
from keras.src.random.seed_generator import global_seed_generator
from tensorflow.python.eager import context

from spark_elastic.elastic.own_generators import GeneratorKind
from spark_elastic.elastic.random_state import RawState, decode_states, encode_states, read_states, set_states

_SEED_MASK = 0x3FFFFFFF
"""Seeds are positive numbers below 2**30, which every type of seed can hold."""


def two_seeds(seed: int) -> list[int]:
    """Return two seeds made of a number of 64 bits."""
    return [seed & _SEED_MASK, (seed >> 32) & _SEED_MASK]


class RandomStates:
    """The states of this process's global generators, to which it returns after a failed step.

    A loop may draw outside of shards, for example the order of the rows. A worker that joins, or makes a step again,
    has to draw the same numbers, so the states travel with those of the virtual workers.
    """

    def __init__(self) -> None:
        self._put_back: Callable[[], None] | None = None
        self._drawn_from: Any = None
        """The state of TensorFlow's seeds after it was set last."""

    def variables(self) -> list[Any]:
        """Return the variables that hold the states of Keras' and TensorFlow's global generators."""
        return [global_seed_generator().state.value, _tensorflow_generator().state]

    def values(self, seed: int) -> list[Any]:
        """Return the values of `variables` for a seed."""
        first, second = two_seeds(seed)
        return [[first, second], [first, second, 0]]

    def seed(self, seed: int) -> None:
        """Seed numpy, Python, and TensorFlow's operations without a generator; the variables are set by the caller."""
        np.random.seed((seed & 0xFFFFFFFF, seed >> 32))
        random.seed(seed)
        self._set_tensorflow(two_seeds(seed)[0])

    def save_seeded(self, seed: int, of_variables: int) -> None:
        """Save the present states for `put_back`: those that `seed` and `values` have just given for these seeds.

        This is done in each step, and reading the states takes longer.
        """
        self._put_back = partial(self._seed_again, seed, of_variables)

    def put_back(self) -> None:
        """Return to the states that were saved last; do nothing if there are none."""
        if self._put_back is not None:
            self._put_back()

    def _seed_again(self, seed: int, of_variables: int) -> None:
        self._drawn_from = None  # drops the kernels of random operations
        self.seed(seed)
        for variable, value in zip(self.variables(), self.values(of_variables), strict=True):
            variable.assign(value)

    def _set(self, states: RawState, seed: int | None, drawn: Any, values: Sequence[Any]) -> None:
        set_states(states)
        # Kernels of random operations count their calls, and the same ones will be called again.
        tf.random.set_seed(seed)
        if seed is not None and drawn is not None:
            context.context()._rng.setstate(drawn)
        self._drawn_from = drawn
        for variable, value in zip(self.variables(), values, strict=True):
            variable.assign(value)

    def encoded(self) -> dict[str, Any]:
        """Save the present states, and return them as bytes and numbers alone, for `load`."""
        eager, states = context.context(), read_states()
        seed, drawn = eager._seed, None if eager._rng is None else eager._rng.getstate()
        values = [np.asarray(variable.read_value()).tolist() for variable in self.variables()]
        self._put_back = partial(self._set, states, seed, drawn, values)
        words = None if drawn is None else (drawn[0], list(drawn[1]), drawn[2])
        return {**encode_states(states), "tensorflow": (seed, words, values)}

    def load(self, encoded: Mapping[str, Any]) -> None:
        """Set the states to those that `encoded` returned, in whatever process."""
        seed, words, values = encoded["tensorflow"]
        drawn = None if words is None else (words[0], tuple(words[1]), words[2])
        self._put_back = partial(self._set, decode_states(dict(encoded)), seed, drawn, values)
        self._put_back()

    def _set_tensorflow(self, seed: int) -> None:
        """Set the global seed; drop the kernels of random operations, which count their calls, only if there are any.

        An operation that runs immediately takes its own seed from a generator of Python, whose state shows whether
        there was one.
        """
        eager = context.context()
        if eager._seed is None or eager._rng.getstate() != self._drawn_from:
            tf.random.set_seed(seed)
        else:
            eager._seed = seed
            eager._rng.seed(seed)
        self._drawn_from = eager._rng.getstate()


def _tensorflow_generator() -> Any:
    try:
        return tf.random.get_global_generator()
    except RuntimeError:  # there was none, and with deterministic operations TensorFlow makes none without a seed
        tf.random.set_global_generator(tf.random.Generator.from_seed(0))
        return tf.random.get_global_generator()


random_states = RandomStates()


# --- generators of the user's own -----------------------------------------------------------------------


def own_kinds(model: Any) -> tuple[GeneratorKind, ...]:
    """Return the kinds of generators of TensorFlow and Keras, apart from those that are the model's variables."""
    variables = [*map(_native, model.variables), *random_states.variables()]
    return tuple(
        GeneratorKind(kind, _seed_variable, _read_variable, _write_variable, partial(_is_one_of, variables))
        for kind in (keras.random.SeedGenerator, tf.random.Generator)
    )


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _seed_variable(generator: Any, seed: int) -> None:
    state = _native(generator.state)
    values = [*two_seeds(seed), 0][: state.shape[0]]  # of the algorithms: two numbers, or a counter of two and a key
    state.assign(np.asarray(values, state.dtype.as_numpy_dtype))


def _read_variable(generator: Any) -> list[int]:
    return list(_native(generator.state).numpy().tolist())


def _write_variable(generator: Any, values: Sequence[int]) -> None:
    state = _native(generator.state)
    state.assign(np.asarray(values, state.dtype.as_numpy_dtype))


def _is_one_of(variables: Sequence[Any], generator: Any) -> bool:
    return any(each is _native(generator.state) for each in variables)
