"""Where `fit` goes on in an epoch that an earlier call has begun: Keras counts from 0 each time that it is entered."""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "_spark_elastic_before"


class Before(NamedTuple):
    """What earlier calls of `fit` have done: whole epochs that Keras does not count, and batches of the present one."""

    epochs: int = 0
    batches: int = 0


def note(model: Any, before: Before) -> None:
    """For the callbacks that ask until the next epoch begins."""
    object.__setattr__(model, _ATTRIBUTE, before)  # not through Keras, which keeps track of what models are given


def before(model: Any) -> Before:
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Before) else Before()
