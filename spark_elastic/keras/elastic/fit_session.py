"""The progress of `model.fit` in terms of the state, across several calls that a lost world cuts short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_elastic.keras import variables as values
from spark_elastic.keras.callback_state import FitResumePoint, set_resume_point
from spark_elastic.keras.elastic.fit_callbacks import extend_history


class FitSession:
    """The progress of `fit`, kept in `state.batch` and `state.epoch` by all callbacks of a state together.

    Keras counts batches from 0 each time that `fit` is entered, and epochs from `initial_epoch`, which Horovod's users
    leave out. `state.batch` and `state.epoch` count on. The reports of several callbacks are taken once.

    Args:
        state: The state.
        totals: Returns the steps of each optimizer so far; None in the middle of a step.
    """

    def __init__(self, state: Any, totals: Callable[[], dict[str, int] | None]) -> None:
        self.counts_batches = False
        self.counts_epochs = False
        self.nothing_left = False
        """`fit` was left after the last batch of its epoch."""
        self.reentered = False
        """The values of another moment have arrived, from which the next `fit` resumes."""
        self.dataset: Callable[[], Any] | None = None
        """Returns a `tf.data.Dataset` like that of `fit`, which is empty until an epoch begins."""
        self.global_batch: int | None = None
        """Rows of a step on all members together, if each member's gradient counts by its rows; only the scale."""
        self._state = state
        self._totals = totals
        self._noted: tuple[dict[str, int], int] | None = None
        """Steps of each optimizer when `state.batch` was last set, and its value."""
        self._running: tuple[Any, list[Any], list[Any]] | None = None
        """The epoch in which the loop was left, the model's metrics, and their values then."""
        self.train_begins()

    # --- called by callbacks --------------------------------------------------------------------

    def train_begins(self) -> None:
        self.batches = 0
        """Batches done since `fit` was entered."""
        self._offset: int | None = None
        """The state's number of an epoch less that of Keras; None before the first epoch of this call."""
        self._batches_before = 0
        self._ended: int | None = None
        self._last: int | None = None

    def epoch_begins(self, epoch: int, model: Any) -> None:
        if self._offset is None:
            self._offset = self._state.epoch - epoch if self.counts_epochs else 0
            self._batches_before = self._state.batch if self.counts_batches else 0
            self._put_running_metrics_back()
            if self.reentered:
                self.reentered = False
                if self.counts_epochs:
                    logs = self._state.fit_callbacks.logs
                    extend_history(getattr(model, "history", None), logs, self._state.epoch, self._offset)
        elif self._ended is not None:
            self._batches_before = 0
        self._ended = self._last = None
        set_resume_point(model, FitResumePoint(self._offset, self._batches_before))
        if self.counts_batches:
            self._note_batch()

    def batch_ends(self, batch: int) -> None:
        if self._last == batch:
            return
        self._last = batch
        if self.counts_batches:
            self._state.batch = self._batches_before + batch + 1
            self._note_batch()
        self.batches += 1

    def epoch_ends(self, epoch: int, logs: dict[str, Any] | None) -> None:
        if self._ended == epoch:
            return
        self._ended = epoch
        number = epoch + (self._offset or 0)
        self._state.fit_callbacks.logs[number] = dict(logs or {})
        if self.counts_epochs:
            self._state.epoch = number + 1
        if self.counts_batches:
            self._state.batch = 0
            self._note_batch()

    def _note_batch(self) -> None:
        totals = self._totals()
        if totals is not None:
            self._noted = totals, self._state.batch

    # --- called when a step has failed, or the loop is left ---------------------------------------

    def fit_ends(self) -> None:
        """Note that the loop is in no `fit` with callbacks of this package, until the next one begins."""
        self._noted = None

    def count_applied_batches(self, totals: dict[str, int], passes: int) -> None:
        """Set `state.batch` to the batches that were applied.

        Of several steps in one execution, and of several passes in one step, some have been applied.

        Args:
            totals: Steps of each optimizer so far.
            passes: Batches a step.
        """
        if self._noted is not None:
            then, batch = self._noted
            missed = max((total - then.get(name, 0) for name, total in totals.items()), default=0)
            self._state.batch = batch + missed * passes

    def keep_running_metrics(self) -> None:
        """Copy the model's metrics where the loop was left: Keras sets them to zero when `fit` is entered again."""
        counting = self._metrics_variables()
        self._running = self._state.__dict__.get("epoch"), counting, values.copies_of(counting)
        self.reentered = True

    def _put_running_metrics_back(self) -> None:
        """Restore the copied metrics, so that the epoch's metrics are those of all its batches.

        Nothing happens if the epoch is not the one that was left.
        """
        running, self._running = self._running, None
        state = self._state.__dict__
        if running is None or running[0] != state.get("epoch") or not state.get("batch"):
            return
        _, counting, copies = running
        if [id(variable) for variable in counting] == [id(variable) for variable in self._metrics_variables()]:
            values.put_back(counting, copies)

    def _metrics_variables(self) -> list[Any]:
        return list(getattr(self._state.__dict__.get("model"), "metrics_variables", ()))


def session_of(state: Any) -> FitSession:
    """Return the session of a `KerasState` or `TensorFlowState`."""
    session: FitSession = state._steps.fit
    return session
