"""Elastic training with Keras: the loop, the states, the dataset and the callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from spark_elastic.elastic import loop
from spark_elastic.elastic.handlers import StateHandler
from spark_elastic.elastic.object_state import ObjectState
from spark_elastic.elastic.state import State
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
    """Decorate `func(state, ...)` so that it is called again whenever workers are lost or arrive.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. Before `func`, call only collectives that a newcomer calls at the same time.
    """
    if BACKEND == "torch":
        return loop.run(func)
    from spark_elastic.tensorflow.host import lost_peers_translated

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with lost_peers_translated():
            return func(state, *args, **kwargs)

    return loop.run(wrapper)  # type: ignore[arg-type]


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
