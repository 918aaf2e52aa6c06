"""Elastic training: the loop, the states and the sampler."""

from __future__ import annotations

from spark_elastic.elastic.handlers import StateHandler
from spark_elastic.elastic.loop import run
from spark_elastic.elastic.object_state import ObjectState
from spark_elastic.elastic.state import State
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from spark_elastic.exact.shards import VirtualShard, virtual_workers
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.elastic.state import TorchState, get_handler_registry, register_handler, set_handler_registry

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "VirtualShard",
    "get_handler_registry",
    "register_handler",
    "run",
    "set_handler_registry",
    "virtual_workers",
]
