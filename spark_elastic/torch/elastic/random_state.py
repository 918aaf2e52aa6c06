"""The states of the random generators of torch, numpy and `random`, which this process returns to after a failure.

A loop may draw outside of shards, for example the order of the rows. A worker that joins, or makes a step again, has to
draw the same numbers as in an undisturbed training, so the states travel with those of the virtual workers.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]
"""Bytes and numbers alone, which checkpoints of any kind can hold."""

_saved: RandomState | None = None
"""The states after the last batch or at the last resume point, whichever came later."""


def save_random_state() -> RandomState:
    """Return the present states, to which `put_back_random_state` returns."""
    global _saved
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, next_gauss = random.getstate()
    _saved = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (np.asarray(keys, dtype=np.uint32).tobytes(), int(position), int(has_gauss), float(gauss)),
        "python": (version, array("I", words).tobytes(), next_gauss),
    }
    return dict(_saved)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the states to those that `save_random_state` returned, in whatever process."""
    global _saved
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(array("I", words)), next_gauss))
    _saved = dict(state)


def put_back_random_state() -> None:
    """Return to the states that were saved last; do nothing if there are none."""
    if _saved is not None:
        set_random_state(_saved)
