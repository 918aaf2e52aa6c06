"""Elastic training with TensorFlow: the loop and the states, among them `TensorFlowState`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError
from spark_elastic.keras.elastic import ObjectState, State, StateHandler, run
from spark_elastic.keras.elastic.handlers import VariableList
from spark_elastic.keras.elastic.state import KerasState as TensorFlowKerasState

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


class TensorFlowState(TensorFlowKerasState):
    """A state of TensorFlow variables and plain values; `variables` and each plain value are attributes.

    If a loop applies gradients itself, this state cannot see when variables change. So after a loss training resumes
    from the last commit, as with Horovod. With a Keras optimizer in the state that trains these variables, it resumes
    from the last mark, if no step has begun since.

    Args:
        variables: Variables of TensorFlow or Keras, in the same order on every member.
        session: Must be None; for compatibility with Horovod.
        kwargs: Anything else to keep, also Keras models and optimizers.

    Raises:
        UsageError: `variables` has something else than variables, or there is a session.
    """

    variables: Any

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise UsageError("there are no sessions in TensorFlow 2; leave session out")
        kept = VariableList(variables or ())
        wrong = [type(v).__name__ for v in kept if not isinstance(v, (tf.Variable, keras.Variable))]
        if wrong:
            raise UsageError(f"variables must be tf.Variable or keras.Variable objects, not {', '.join(wrong)}")
        super().__init__(kwargs.pop("model", None), kwargs.pop("optimizer", None), variables=kept, **kwargs)
