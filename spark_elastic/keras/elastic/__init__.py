"""Elastic training with Keras: the loop, the states, the dataset and the callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from spark_elastic.elastic import loop
from spark_elastic.elastic.handlers import StateHandler
from spark_elastic.elastic.state import ObjectState, State
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.elastic.fit import (
    CommitStateCallback,
    ElasticCallback,
    ElasticDataset,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from spark_elastic.keras.elastic.state import KerasState

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: run `func(state, ...)` so that it outlives the loss and the arrival of workers.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. No collective may be called on the way to it that a newcomer would not call at the same time.
    """
    return loop.run(_with_translated_errors(func))


def _with_translated_errors(func: Callable[P, R]) -> Callable[P, R]:
    """Have `func` raise a lost peer as `HorovodInternalError`, where TensorFlow raises an error of its own for it."""
    if BACKEND == "torch":
        return func
    from spark_elastic.tensorflow.host import translated

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with translated():
            return func(*args, **kwargs)

    return wrapper


__all__ = [
    "CommitStateCallback",
    "ElasticCallback",
    "ElasticDataset",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "StateHandler",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
