"""What a state keeps of `model.fit` while `fit` is left and entered again: its progress, and the values of callbacks.

`FitSession` continues the counts of batches and epochs, which Keras starts anew in each call of `fit`. `FitCallbacks`
keeps the values of callbacks and sends them to newcomers: Keras calls `on_train_begin` each time that `fit` is entered,
where EarlyStopping and others start anew. The values that a callback has changed since its training began are restored
before the first epoch that `fit` runs in the next world. Callbacks are matched by class and order, so they may be
created anew each time. `keras.callback_state` says which values are kept.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras

from spark_elastic.elastic.call_stack import calling_method, calling_object
from spark_elastic.errors import UsageError
from spark_elastic.keras import backend
from spark_elastic.keras.callback_state import plain_values, put_values, refuse, same
from spark_elastic.keras.callbacks import LearningRateScheduleCallback
from spark_elastic.keras.elastic.handlers import learning_rate_of

log = logging.getLogger("spark_elastic.keras")

_ABOVE = 6
"""Largest number of calls between `CallbackList.set_model` and `set_model` of a callback."""
_REFUSED = {
    "BackupAndRestore": "it would overwrite the state's weights with those of its file each time a worker is lost; a "
    "KerasState keeps them, and ModelCheckpoint writes files",
    "SwapEMAWeights": "an epoch may be left and resumed, which would swap the weights twice; use_ema=True in the "
    "optimizer gives the trained model the averages",
}
_BATCH_EVENTS = (
    *("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_test_batch_begin", "on_test_batch_end"),
)

Values = dict[str, Any]


class EpochBegin(NamedTuple):
    """The state's number of an epoch, and the learning rates before and after `on_epoch_begin` of all callbacks."""

    epoch: int
    before: float
    after: float


class Snapshot(NamedTuple):
    """The values that each callback has changed, and whether a `fit` has begun an epoch and ended. Immutable."""

    begun: bool = False
    ended: bool = False
    stopped_at: int | None = None
    """The state's epoch when the call returned, if a callback has stopped the training."""
    values: Mapping[str, Values] = {}  # never changed
    epoch_begin: EpochBegin | None = None
    """The epoch that has begun last; None if it is not known, or the learning rate follows a schedule."""
    progress_after: Mapping[str, int] | None = None
    """In the commit at the end of a `fit`: what the state counts after it. The code behind `fit` runs again after a
    loss, so the same `fit` is called again, and ends at once. None elsewhere."""

    def __deepcopy__(self, memo: Any) -> Snapshot:
        return self


class _WatchedCallback:
    """A callback of the `fit` that runs, and copies of its values."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.at_begin = plain_values(callback)
        self.acts_on_batches = any(not hasattr(getattr(callback, event), "_is_default") for event in _BATCH_EVENTS)
        self.copied: tuple[int, Values] | None = None
        """The number of events when values were last copied, and these copies; None before."""


class FitCallbacks:
    """A value of a `KerasState`: the values of the callbacks of `fit`."""

    session: FitSession
    """That of the state, which sets it."""

    def __init__(self) -> None:
        self.after_batch: Callable[[], None] | None = None
        """A function to call when the end of the present batch has reached all callbacks."""
        self.after_training: Callable[[], None] | None = None
        """A function to call when the end of the training has reached all callbacks."""
        self._attached: Any = None
        self._watched: dict[str, _WatchedCallback] = {}
        self._changing: dict[str, set[str]] = {}
        """By callback, the names of the values that it has changed since its training began."""
        self.kept = Snapshot()
        """The values from which the next `fit` resumes; while one runs, those from which it has resumed."""
        self._begun = False
        """The call of `fit` that runs has begun an epoch."""
        self._resuming = False
        """The loop's function was called again, and no epoch has begun since."""
        self._events = 0
        self._epoch_begin: EpochBegin | None = None

    # --- called by a state ------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        return self._snapshot() if self._begun else self.kept

    def load_state_dict(self, snapshot: Snapshot) -> None:
        """Make the next `fit`, or the one that runs, resume from these values."""
        snapshot = Snapshot(*snapshot)  # a plain tuple, if it is from a checkpoint
        kept = {key: dict(values) for key, values in snapshot.values.items()}
        for key, watched in self._watched.items():
            for name in self._changing.get(key, ()):
                if name in watched.at_begin:  # unless it is in the snapshot, it was first changed after that
                    kept.setdefault(key, {}).setdefault(name, watched.at_begin[name])
        for key, values in kept.items():
            self._changing.setdefault(key, set()).update(values)
        self.kept = snapshot._replace(values=kept)
        self._epoch_begin = snapshot.epoch_begin
        if self._begun:
            self._put()
        elif snapshot.begun:
            self._resuming = True

    def left(self) -> None:
        """Handle the end of the loop's function by an error, perhaps in the middle of `fit`."""
        if self._begun:
            self.kept = self._snapshot()
        self._begun = False
        self._resuming = self.kept.begun

    def over(self) -> None:
        """Handle the end of the loop: the next `fit` starts anew."""
        self._begun = self._resuming = False

    # --- called by `fit` ----------------------------------------------------------------------------

    def attach(self) -> None:
        """Observe all callbacks of `fit`, from `set_model` of one; raise UsageError if one cannot be used in a loop."""
        # Keras gives a callback no access to the list of callbacks, which is a caller of `set_model`
        callbacks = calling_object(lambda caller: isinstance(caller, keras.callbacks.CallbackList), within=_ABOVE)
        if callbacks is None or callbacks is self._attached:
            return
        for callback in callbacks.callbacks:
            refuse(callback, "an elastic loop", _REFUSED, UsageError)
        self._attached = callbacks
        around = {
            "on_train_begin": self._train_begins,
            "on_train_end": self._train_ends,
            "on_epoch_begin": self._epoch_begins,
            "on_train_batch_end": self._batch_ends,
            "on_epoch_end": self._epoch_ends,
            "on_test_begin": self._event,
            "on_test_end": self._event,
        }
        for name, function in around.items():
            setattr(callbacks, name, partial(function, callbacks, getattr(callbacks, name)))

    def _train_begins(self, callbacks: Any, plain: Callable[..., Any], *args: Any, **logs: Any) -> None:
        self.session.train_begins()
        self._begun = False
        self._watched = {}
        for callback in callbacks.callbacks:
            if self._resuming and isinstance(getattr(callback, "append", None), bool):
                callback.append = True  # keep the rows written before
        plain(*args, **logs)
        self._watched = {key: _WatchedCallback(callback) for key, callback in _by_key(callbacks.callbacks)}
        kept = self.kept
        stopped = kept.stopped_at is not None and kept.stopped_at == self.session.epoch
        _, given = calling_method(lambda owner: isinstance(owner, keras.Model), ("fit",), within=_ABOVE)
        has_epochs = not given or given["initial_epoch"] < given["epochs"]
        if self._resuming and (stopped or (kept.progress_after is not None and has_epochs)):
            self._put()
            callbacks.model._initial_epoch = sys.maxsize  # this call has ended before: no epoch is left

    def _epoch_begins(self, callbacks: Any, plain: Callable[..., Any], number: int, *args: Any, **logs: Any) -> None:
        resumed = self.session.epoch_begins(number, (callbacks.params or {}).get("epochs"))
        if not self._begun:
            self._begun = True
            if self._resuming and not self.kept.ended:
                self._put()
            else:
                self.kept, self._changing, self._epoch_begin = Snapshot(), {}, None
            self._resuming = False
        for callback in callbacks.callbacks:
            if isinstance(callback, LearningRateScheduleCallback):
                callback.resumed = resumed
        epoch, rate = self.session.epoch, learning_rate_of(getattr(callbacks.model, "optimizer", None))
        if epoch is None or rate is None:
            self._event(callbacks, plain, number, *args, **logs)
            return
        # An epoch that is entered again begins with the rate it has begun with, or a callback that multiplies the rate
        # would do so once more. If it then has the same rate as before, changes within the epoch are kept.
        now, earlier = float(rate.numpy()), self._epoch_begin
        again = earlier is not None and earlier.epoch == epoch
        begin = EpochBegin(epoch, earlier.before if earlier is not None and again else now, 0.0)
        rate.assign(begin.before)
        self._event(callbacks, plain, number, *args, **logs)
        self._epoch_begin = begin._replace(after=float(rate.numpy()))
        if again and self._epoch_begin == earlier:
            rate.assign(now)

    def _epoch_ends(self, callbacks: Any, plain: Callable[..., Any], number: int, *args: Any, **logs: Any) -> None:
        self._event(callbacks, plain, number, *args, **logs)
        self.session.epoch_ends(number)  # last: if a callback fails in a collective, the end of the epoch is repeated

    def _batch_ends(self, callbacks: Any, plain: Callable[..., Any], number: int, *args: Any, **logs: Any) -> None:
        self.session.batch_ends(number)
        plain(number, *args, **logs)
        then, self.after_batch = self.after_batch, None
        if then is not None:
            then()

    def _event(self, callbacks: Any, plain: Callable[..., Any], *args: Any, **logs: Any) -> None:
        self._events += 1
        plain(*args, **logs)
        self._events += 1

    def _train_ends(self, callbacks: Any, plain: Callable[..., Any], *args: Any, **logs: Any) -> None:
        stopped = self._begun and callbacks.model.stop_training
        progress = None
        if callbacks.model._initial_epoch == sys.maxsize:
            callbacks.model._initial_epoch = None
            progress = self.kept.progress_after
        self._event(callbacks, plain, *args, **logs)
        if self._begun:
            self.kept = Snapshot(True, True, self.session.epoch if stopped else None, self._values())
        elif self._resuming and self.kept.ended:
            self._put()  # the History, for one, of a call that was complete
        self._begun = False
        if progress is not None:
            self.kept = self.kept._replace(progress_after=None)
            self.session.set_progress(progress)
        then, self.after_training = self.after_training, None
        if then is not None:
            then()
        self.session.fit_ends()

    # --- values -------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return Snapshot(True, values=self._values(), epoch_begin=self._epoch_begin)

    def _values(self) -> dict[str, Values]:
        """Return copies of the values that each callback has changed."""
        found, missing = {}, object()
        for key, watched in self._watched.items():
            if watched.copied is None or watched.acts_on_batches or watched.copied[0] != self._events:
                values, first = plain_values(watched.callback), watched.at_begin
                changing = self._changing.setdefault(key, set())
                changing |= {name for name, value in values.items() if not same(value, first.get(name, missing))}
                watched.copied = self._events, {name: values[name] for name in changing if name in values}
            found[key] = watched.copied[1]
        return found

    def _put(self) -> None:
        for key, watched in self._watched.items():
            put_values(watched.callback, self.kept.values.get(key, {}))
            watched.copied = None


def _by_key(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the callbacks to observe, each with a key that is the same on every member and in every call of `fit`."""
    counts: dict[str, int] = {}
    found = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger) or getattr(callback, "kept_by_state", False):
            continue
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        counts[kind] = counts.get(kind, 0) + 1
        found.append((f"{kind}#{counts[kind]}", callback))
    return found


class FitSession:
    """Keeps `state.batch` and `state.epoch` for all callbacks of a state together.

    Keras counts batches from 0 each time that `fit` is entered, and epochs from `initial_epoch`, which Horovod's users
    leave out; the state goes on counting.
    """

    def __init__(self, state: Any) -> None:
        self.marks = False
        """A `fit` runs whose callbacks mark the state after each batch."""
        self.counts_batches = False
        self.counts_epochs = False
        self.nothing_left = False
        """`fit` was left after the last batch of its epoch."""
        self.batches_in_advance: Callable[[int], Any] | None = None
        """A function that returns an iterator over so many first batches of the dataset of `fit`; None: not known."""
        self.global_batch: int | None = None
        """Rows of a step on all members together, to which weights by rows are relative; None: all members weigh 1."""
        self._state = state
        self._planned: int | None = None
        """The state's epoch at which the `fit` that runs, or that was left by an error, ends; None if it has ended."""
        self._running: tuple[int | None, backend.Copies] | None = None
        """When the loop was last left: the epoch, and the values of the model's metrics."""
        self.train_begins()

    @property
    def epoch(self) -> int | None:
        """The state's epoch, if it counts epochs."""
        number: int | None = self._state.__dict__.get("epoch")
        return number

    # --- called in `fit` ------------------------------------------------------------------------

    def train_begins(self) -> None:
        self.batches = 0
        """Batches done since `fit` was entered."""
        self._offset: int | None = None
        """The state's number of an epoch minus that of Keras; None before the first epoch of this call."""
        self._batches_before = 0
        self._before_end: dict[str, int] = {}
        """What the state has counted before the end of the epoch that has ended last."""

    def epoch_begins(self, epoch: int, epochs: int | None) -> tuple[int, int]:
        """Handle the beginning of the epoch of Keras' number `epoch`; `epochs` is the argument of `fit`.

        Returns the number of epochs done that Keras does not count, and that of batches done of this epoch.
        """
        if self._offset is None:
            self._offset = self._state.epoch - epoch if self.counts_epochs else 0
            if self.counts_epochs and epochs is not None:
                end = epochs + self._offset
                if self._planned is not None and end > self._planned:
                    log.warning(
                        "model.fit was entered again and now trains until epoch %d; before, it was until epoch %d. "
                        "Keras counts epochs anew in each call: give fit initial_epoch=state.epoch, or "
                        "epochs=n - state.epoch",
                        end,
                        self._planned,
                    )
                self._planned = end
            self._batches_before = self._state.batch if self.counts_batches else 0
            self._put_running_metrics_back()
        return self._offset, self._batches_before

    def batch_ends(self, batch: int) -> None:
        if self.counts_batches:
            self._state.batch = self._batches_before + batch + 1
        self.batches += 1

    def epoch_ends(self, epoch: int) -> None:
        self._batches_before = 0
        self._before_end = self._progress()
        if self.counts_epochs:
            self._state.epoch = epoch + (self._offset or 0) + 1
        if self.counts_batches:
            self._state.batch = 0

    def commit_before_end(self, commit: Callable[[], None]) -> None:
        """Commit the state as it was before the end of the last epoch: after a loss, `fit` is called again and ends."""
        memory, after = self._state.fit_callbacks, self._progress()
        kept = memory.kept
        self.set_progress(self._before_end)
        memory.kept = kept._replace(progress_after=after)
        try:
            commit()
        finally:
            memory.kept = kept
            self.set_progress(after)

    def set_progress(self, progress: Mapping[str, int]) -> None:
        for name, value in progress.items():
            setattr(self._state, name, value)

    def _progress(self) -> dict[str, int]:
        counted = {"epoch": self.counts_epochs, "batch": self.counts_batches}
        return {name: getattr(self._state, name) for name, is_counted in counted.items() if is_counted}

    # --- called when a step has failed, or the loop is left ---------------------------------------

    def fit_ends(self) -> None:
        """Handle the end of a `fit` with callbacks of this package."""
        self.marks = False
        self._planned = None

    def keep_running_metrics(self) -> None:
        """Copy the model's metrics when the loop is left, because Keras resets them when `fit` is entered again."""
        self.marks = False
        self._running = self.epoch, backend.Copies(self._metrics_variables())

    def _put_running_metrics_back(self) -> None:
        """Restore the metrics of the epoch that was left, so that they are those of all its batches."""
        running, self._running = self._running, None
        if running is None or running[0] != self.epoch or not self._state.__dict__.get("batch"):
            return
        if list(map(id, running[1].variables)) == list(map(id, self._metrics_variables())):
            running[1].restore()

    def _metrics_variables(self) -> list[Any]:
        return list(getattr(self._state.__dict__.get("model"), "metrics_variables", ()))
