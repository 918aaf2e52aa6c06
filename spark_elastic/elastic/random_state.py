"""The states of the random generators of numpy and `random`, as they are and as bytes that a checkpoint can hold."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np

RawState = tuple[Any, Any]
"""The states as numpy and `random` return them; copies, which nothing changes."""


def read_states() -> RawState:
    """Return the present states. Takes a few microseconds, unlike `encode_states`."""
    return np.random.get_state(), random.getstate()


def set_states(states: RawState) -> None:
    """Set the states to those that `read_states` returned."""
    of_numpy, of_python = states
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def encode_states(states: RawState) -> dict[str, Any]:
    """Return the states as bytes and numbers alone, which checkpoints of any kind can hold."""
    (_, keys, position, has_gauss, gauss), (version, words, next_gauss) = states
    return {
        "numpy": (np.asarray(keys, dtype=np.uint32).tobytes(), int(position), int(has_gauss), float(gauss)),
        "python": (version, array("I", words).tobytes(), next_gauss),
    }


def decode_states(encoded: dict[str, Any]) -> RawState:
    """Return the states that `encode_states` encoded, in whatever process."""
    keys, position, has_gauss, gauss = encoded["numpy"]
    version, words, next_gauss = encoded["python"]
    of_numpy = "MT19937", np.frombuffer(keys, dtype=np.uint32), position, has_gauss, gauss
    return of_numpy, (version, tuple(array("I", words)), next_gauss)
