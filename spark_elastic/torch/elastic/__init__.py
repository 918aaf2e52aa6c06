"""Elastic training: the loop, the states and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from spark_elastic.elastic import state as _base
from spark_elastic.elastic.frontend import frontend
from spark_elastic.elastic.handled_state import ObjectState, State
from spark_elastic.elastic.handled_values import StateHandler
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from spark_elastic.torch.elastic.handlers import get_handler_registry, register_handler, set_handler_registry
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.elastic.state import TorchState

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=_base.State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: run `func(state, ...)` so that it outlives the loss and the arrival of workers.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. No collective may be called on the way to it that a newcomer would not call at the same time.
    """
    return _base.elastic_loop(func, frontend)


__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "register_handler",
    "run",
    "set_handler_registry",
]
