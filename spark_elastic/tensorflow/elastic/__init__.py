"""Elastic training with TensorFlow: the loop and the states."""

from __future__ import annotations

from spark_elastic.elastic.handlers import StateHandler
from spark_elastic.elastic.object_state import ObjectState
from spark_elastic.elastic.state import State
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from spark_elastic.keras.elastic import run
from spark_elastic.keras.elastic.state import KerasState as TensorFlowKerasState
from spark_elastic.tensorflow.elastic.state import TensorFlowState

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]
