"""The states of the random generators of torch, numpy and `random`, which this process returns to after a failure.

A loop may draw outside of shards, for example the order of the rows. A worker that joins, or makes a step again, has to
draw the same numbers as in an undisturbed training, so the states travel with those of the virtual workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from spark_elastic.elastic.random_state import RawState, decode_states, encode_states, read_states, set_states

RandomState = dict[str, Any]
"""Bytes and numbers alone, which checkpoints of any kind can hold."""

_put_back: Callable[[], None] | None = None
"""A function that sets the states after the last batch or at the last mark, whichever came later.

After a batch the generators have just been seeded, so seeding them again is enough. Reading their states takes longer,
and is done at marks alone.
"""


def save_random_state(seed_again: Callable[[], None]) -> None:
    """Save the present states, to which `put_back_random_state` returns: those that a function has just set."""
    global _put_back
    _put_back = seed_again


def encoded_random_state() -> RandomState:
    """Save the present states, and return them for `set_random_state`."""
    global _put_back
    of_torch, others = torch.get_rng_state(), read_states()
    _put_back = partial(_set, of_torch, others)
    return {"torch": of_torch.numpy().tobytes(), **encode_states(others)}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the states to those that `encoded_random_state` returned, in whatever process."""
    global _put_back
    _put_back = partial(
        _set, torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8), decode_states(dict(state))
    )
    _put_back()


def put_back_random_state() -> None:
    """Return to the states that were saved last; do nothing if there are none."""
    if _put_back is not None:
        _put_back()


def _set(of_torch: torch.Tensor, others: RawState) -> None:
    torch.set_rng_state(of_torch)
    set_states(others)
