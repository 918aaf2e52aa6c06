"""Callbacks that keep a `KerasState` up to date while `model.fit` runs, and leave it when the world changes.

`ElasticCallback` does all of it. Horovod's three callbacks are parts of it; here their order does not matter, because
each works out by itself what the others know.
"""

from __future__ import annotations

from typing import Any

import keras

from spark_elastic.errors import UsageError
from spark_elastic.keras.callback_state import FitResumePoint, set_resume_point
from spark_elastic.keras.elastic.fit_callbacks import go_on_with
from spark_elastic.keras.elastic.state import KerasState


class FitProgress:
    """Where `fit` stands, in terms of the state; shared by all callbacks of a state, whose reports it takes once.

    Keras counts batches from 0 each time that `fit` is entered, and epochs from `initial_epoch`, which Horovod's users
    leave out. `state.batch` and `state.epoch` count on.
    """

    def __init__(self, state: KerasState) -> None:
        self.state = state
        self.counts_batches = False
        self.counts_epochs = False
        self.train_begins()

    def train_begins(self) -> None:
        self.batches = 0
        """Done since `fit` was entered."""
        self._offset: int | None = None
        self._before = 0
        self._ended: int | None = None
        self._last: int | None = None

    def epoch_begins(self, epoch: int, model: Any) -> None:
        if self._offset is None:
            self._offset = self.state.epoch - epoch if self.counts_epochs else 0
            self._before = self.state.batch if self.counts_batches else 0
            self.state.put_running_metrics_back()
            if self.state.reentered:
                self.state.reentered = False
                if self.counts_epochs:
                    logs = self.state.fit_callbacks.logs
                    go_on_with(getattr(model, "history", None), logs, self.state.epoch, self._offset)
        elif self._ended is not None:
            self._before = 0
        self._ended = self._last = None
        set_resume_point(model, FitResumePoint(self._offset, self._before))
        if self.counts_batches:
            self.state.note_batch()

    def batch_ends(self, batch: int) -> None:
        if self._last == batch:
            return
        self._last = batch
        if self.counts_batches:
            self.state.batch = self._before + batch + 1
            self.state.note_batch()
        self.batches += 1

    def epoch_ends(self, epoch: int, logs: dict[str, Any] | None) -> None:
        if self._ended == epoch:
            return
        self._ended = epoch
        number = epoch + (self._offset or 0)
        self.state.fit_callbacks.logs[number] = dict(logs or {})
        if self.counts_epochs:
            self.state.epoch = number + 1
        if self.counts_batches:
            self.state.batch = 0
            self.state.note_batch()


def _progress_of(state: KerasState) -> FitProgress:
    known = state.__dict__.get("_fit_progress")
    if known is None:
        known = FitProgress(state)
        object.__setattr__(state, "_fit_progress", known)
    return known


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    counts_batches = False
    counts_epochs = False
    kept_by_state = True
    """It has nothing to remember besides the state."""

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state
        self.progress = _progress_of(state)
        for wanted, name in ((self.counts_batches, "batch"), (self.counts_epochs, "epoch")):
            if wanted and name not in state.__dict__:
                raise UsageError(f"{type(self).__name__} counts in state.{name}: KerasState(model, {name}=0, ...)")
        self.progress.counts_batches |= self.counts_batches
        self.progress.counts_epochs |= self.counts_epochs

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.state.fit_callbacks.attach()

    def on_train_begin(self, logs: Any = None) -> None:
        self.progress.train_begins()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.progress.epoch_begins(epoch, self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.progress.batch_ends(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.progress.epoch_ends(epoch, logs)


class UpdateBatchStateCallback(_StateCallback):
    """Keeps `state.batch`: batches that are done in this epoch, also those before `fit` was entered again."""

    counts_batches = True


class UpdateEpochStateCallback(_StateCallback):
    """Keeps `state.epoch`: epochs that are done; the number of the present one, counted from 0.

    It is right with `fit(initial_epoch=state.epoch, epochs=n)` and with `fit(epochs=n - state.epoch)`.
    """

    counts_epochs = True


class CommitStateCallback(_StateCallback):
    """Commits every `batches_per_commit` batches and after each epoch; leaves `fit` when the world is about to change.

    After every batch training can go on from there without going back to the commit. The world is asked for before
    the next batch, not after this one, so that no other callback misses the end of a batch or an epoch.
    """

    def __init__(self, state: KerasState, batches_per_commit: int | None = 1) -> None:
        if batches_per_commit is not None and batches_per_commit < 1:
            raise UsageError(f"batches_per_commit must be at least 1, or None, not {batches_per_commit}")
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._since_commit = 0
        self._epoch_ended = False

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._since_commit = 0
        self._epoch_ended = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._commit_epoch()
        if self.progress.batches:
            self.state.leave_if_updated()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.state.sync_if_built_late()
        self._since_commit += 1
        if self.batches_per_commit is not None and self._since_commit >= self.batches_per_commit:
            self._commit()
        else:
            self.state.resume_here()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        # Not yet: another callback may fail in a collective of its own, and then this epoch's end is to come again.
        self._epoch_ended = True

    def on_train_end(self, logs: Any = None) -> None:
        self._commit_epoch()

    def _commit_epoch(self) -> None:
        if self._epoch_ended:
            self._epoch_ended = False
            self._commit()

    def _commit(self) -> None:
        self._since_commit = 0
        self.state.commit_here()


class ElasticCallback(CommitStateCallback):
    """All that a `KerasState` needs of `model.fit`: counts batches and epochs, commits, and leaves `fit` in time.

    Its place among the callbacks does not matter.

    Args:
        state: with `batch=0` and `epoch=0`.
        batches_per_commit: None: a commit after each epoch only. A lost worker costs no step either way; a commit is
            gone back to only when a collective fails that a callback or the loop itself has called.
    """

    counts_batches = True
    counts_epochs = True

    def __init__(self, state: KerasState, batches_per_commit: int | None = None) -> None:
        super().__init__(state, batches_per_commit)
