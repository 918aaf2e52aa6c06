"""Elastic training with Keras: the loop, the state and the callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from spark_elastic.elastic import state as _base
from spark_elastic.elastic.frontend import frontend
from spark_elastic.elastic.handled_state import ObjectState, State
from spark_elastic.elastic.handled_values import StateHandler
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from spark_elastic.keras.elastic.callbacks import (
    CommitStateCallback,
    ElasticCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from spark_elastic.keras.elastic.dataset import ElasticDataset
from spark_elastic.keras.elastic.lost_peer import with_lost_peers_named
from spark_elastic.keras.elastic.state import KerasState

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=_base.State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: run `func(state, ...)` so that it outlives the loss and the arrival of workers.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. No collective may be called on the way to it that a newcomer would not call at the same time.
    """
    return _base.elastic_loop(with_lost_peers_named(func), frontend)


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
