"""TensorFlowState: variables of TensorFlow and plain values that outlive a change of the world."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from spark_elastic.elastic.handled_values import StateHandler
from spark_elastic.errors import UsageError
from spark_elastic.keras.elastic.handlers import ListHandler
from spark_elastic.keras.elastic.state import KerasState


class TensorFlowState(KerasState):
    """Variables and plain values; `variables` and each of the latter are attributes.

    A loop that applies gradients itself tells nobody when its variables change. So after a loss it goes on from the
    last commit, as with Horovod; or, with a Keras optimizer in the state that counts the steps, from the last of them.

    Args:
        variables: of TensorFlow or Keras, in the same order on every member.
        session: accepted for Horovod's sake; must be None.
        kwargs: anything else to keep, also Keras models and optimizers.

    Raises: UsageError: something else than variables, or a session.
    """

    variables: Any
    _kept: list[Any]

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise UsageError("there are no sessions in TensorFlow 2; leave session out")
        kept = list(variables or ())
        wrong = [type(v).__name__ for v in kept if not isinstance(v, (tf.Variable, keras.Variable))]
        if wrong:
            raise UsageError(f"variables must be tf.Variable or keras.Variable objects, not {', '.join(wrong)}")
        object.__setattr__(self, "_kept", kept)
        super().__init__(variables=kept, **kwargs)

    def _handler_for(self, value: Any) -> StateHandler | None:
        return ListHandler(value) if value is self._kept else super()._handler_for(value)
