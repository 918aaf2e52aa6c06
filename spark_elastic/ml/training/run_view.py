"""The training as callbacks see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import Callback, Logs, follows
from spark_elastic.reporting.history import History

if TYPE_CHECKING:
    from spark_elastic.ml.training.trainer import Trainer


class RunView:
    """`callbacks.Run`; also holds what callbacks have asked for since it was last acted upon."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._measured: tuple[int, Logs] = (-1, {})
        """The last `logs`, and the moment that they are of."""
        self.wants_restore = False
        self.caller = Callback()
        """Whose `on_epoch_end` is running."""
        self.why = ""
        """Of `stop`. Stays: the others act on it together, at the next reduction that succeeds."""
        self.forget()

    def forget(self) -> None:
        """What was asked for was done, or is asked for again because the collective after it has failed."""
        self.wants_checkpoint = False
        self.wants_best = False
        self.best_of: list[str] = []

    @property
    def rank(self) -> int:
        return self._trainer.rank

    @property
    def size(self) -> int:
        return self._trainer.size

    @property
    def epoch(self) -> int:
        return self._trainer.state.at.epoch

    @property
    def epochs(self) -> int:
        return self._trainer.training.epochs

    @property
    def step(self) -> int:
        return self._trainer.state.at.step

    @property
    def history(self) -> History:
        return self._trainer.state.at.history

    @property
    def logs(self) -> Logs:
        at = self._trainer.state.at
        if self._measured[0] != at.serial:
            self._measured = at.serial, self._trainer.engine.logs(at.sums, at.pieces) if at.sums.size else {}
        return self._measured[1]

    @property
    def model(self) -> Any:
        return self._trainer.engine.model

    @property
    def optimizer(self) -> Any:
        return self._trainer.engine.optimizer

    def stop(self, reason: str) -> None:
        self.why = reason or "a callback has asked for it"

    def checkpoint(self, *, best: bool = False) -> None:
        self.wants_checkpoint = True
        if best:
            # others' best epochs are of other values: they mark a checkpoint, and not the weights to go back to
            self.wants_best = self.wants_best or self.caller.restores_best
            self.best_of += [name for name in [follows(self.caller)] if name not in self.best_of]

    def restore_best(self) -> None:
        if not self._trainer.engine.keeps_best:
            raise InvalidSettingsError("a callback that calls restore_best() has to set `restores_best = True`")
        self.wants_restore = True
