"""Callbacks that keep a `KerasState` up to date while `model.fit` runs, and leave it when the world changes.

`ElasticCallback` does all of it. Horovod's three callbacks are parts of it; their order does not matter, because they
share a `FitSession`.
"""

from __future__ import annotations

from typing import Any

import keras

from spark_elastic.errors import UsageError
from spark_elastic.keras.elastic.fit_session import session_of
from spark_elastic.keras.elastic.state import KerasState


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    counts_batches = False
    counts_epochs = False
    kept_by_state = True
    """It has no values of its own to restore, see `FitCallbacks`."""

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state
        self.session = session_of(state)
        for wanted, name in ((self.counts_batches, "batch"), (self.counts_epochs, "epoch")):
            if wanted and name not in state.__dict__:
                raise UsageError(
                    f"{type(self).__name__} counts in state.{name}, which the state does not have; create it with "
                    f"KerasState(model, {name}=0, ...)"
                )
        self.session.counts_batches |= self.counts_batches
        self.session.counts_epochs |= self.counts_epochs

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.state.fit_callbacks.attach()

    def on_train_begin(self, logs: Any = None) -> None:
        self.session.train_begins()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.session.epoch_begins(epoch, self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.session.batch_ends(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.session.epoch_ends(epoch, logs)


class UpdateBatchStateCallback(_StateCallback):
    """Keeps `state.batch`: the batches done in this epoch, with those before `fit` was entered again."""

    counts_batches = True


class UpdateEpochStateCallback(_StateCallback):
    """Keeps `state.epoch`: the epochs done, which is the number of the present one counted from 0.

    It works with `fit(initial_epoch=state.epoch, epochs=n)` and with `fit(epochs=n - state.epoch)`.
    """

    counts_epochs = True


class CommitStateCallback(_StateCallback):
    """Commits every `batches_per_commit` batches and after each epoch; leaves `fit` when the world is about to change.

    Training can resume after every batch without a return to the commit. The check for updated hosts comes before the
    next batch, not after this one, so that no other callback misses the end of a batch or an epoch.
    """

    def __init__(self, state: KerasState, batches_per_commit: int | None = 1) -> None:
        if batches_per_commit is not None and batches_per_commit < 1:
            raise UsageError(f"batches_per_commit must be at least 1, or None; got {batches_per_commit}")
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
        if self.session.batches:
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
        # the commit comes later: if another callback fails in a collective, the end of this epoch has to come again
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
    """Does everything that a `KerasState` needs of `model.fit`: counts batches and epochs, commits, leaves in time.

    Its position among the callbacks does not matter.

    Args:
        state: Created with `batch=0` and `epoch=0`.
        batches_per_commit: None: a commit after each epoch only. A lost worker costs no step either way; training
            returns to a commit only when a collective fails that a callback or the loop itself has called.
    """

    counts_batches = True
    counts_epochs = True

    def __init__(self, state: KerasState, batches_per_commit: int | None = None) -> None:
        super().__init__(state, batches_per_commit)
