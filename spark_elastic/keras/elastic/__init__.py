"""Elastic training with Keras: the loop, the states, the dataset and the callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

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

F = TypeVar("F", bound=Callable[..., Any])


def run(func: F) -> F:
    """Decorate `func(state, ...)` so that it is called again whenever workers are lost or arrive.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. Before `func`, call only collectives that a newcomer calls at the same time.
    """
    looped: Any = func
    if BACKEND == "tensorflow":
        from spark_elastic.tensorflow.host import lost_peers_translated

        looped = lost_peers_translated()(func)
    return cast("F", loop.run(looped))


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
