"""The state of a Keras model's training."""

from __future__ import annotations

from typing import Any

from spark_elastic.collective.handled_values import StateHandler
from spark_elastic.core.recovery import Recovery
from spark_elastic.keras.elastic.handlers import handler_for
from spark_elastic.ml.keras.callbacks import KerasCallbacks
from spark_elastic.ml.keras.engine import KerasEngine
from spark_elastic.ml.training.engine import TrainingState
from spark_elastic.ml.training.progress import Progress


class KerasTrainingState(TrainingState):
    """Model, optimizer, the weights of the best epoch, what callbacks remember, and how far the training has come.

    Its steps are those of the engine, which tells of each.
    """

    def __init__(self, engine: KerasEngine, *, callbacks: KerasCallbacks, at: Progress) -> None:
        self._engine = engine
        super().__init__(model=engine.model, optimizer=engine.optimizer, best=engine.best, callbacks=callbacks, at=at)
        self._steps["optimizer"] = 0
        engine.stepped = lambda: self._stepped("optimizer")
        self.save()

    def _handler_for(self, value: Any) -> StateHandler | None:
        return handler_for(value, lambda: {"model": self._engine.model})

    def _settle(self, choice: Recovery) -> None:
        self._engine.put_back()
