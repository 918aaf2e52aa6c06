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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras

from spark_elastic.elastic.call_stack import calling_method, calling_object
from spark_elastic.errors import UsageError
from spark_elastic.keras import backend
from spark_elastic.keras.callback_state import (
    FitResumePoint,
    plain_values,
    put_values,
    refuse,
    same,
    set_resume_point,
)
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
    """A value of a `KerasState`, of which `epoch` returns the epoch: the values of the callbacks of `fit`."""

    def __init__(self, epoch: Callable[[], int | None]) -> None:
        self.detached: Callable[[], None] = lambda: None
        """A function to call when a `fit` with callbacks of this package has ended."""
        self.after_batch: Callable[[], None] | None = None
        """A function to call when the end of the present batch has reached all callbacks."""
        self.after_training: Callable[[], None] | None = None
        """A function to call when the end of the training has reached all callbacks."""
        self.set_progress: Callable[[Mapping[str, int]], None] = lambda progress: None
        """A function that sets what the state counts."""
        self._epoch = epoch
        self._attached: Any = None
        self._watched: dict[str, _WatchedCallback] = {}
        self._changing: dict[str, set[str]] = {}
        """By callback, the names of the values that it has changed since its training began."""
        self._kept = Snapshot()
        """The values from which the next `fit` resumes; while one runs, those from which it has resumed."""
        self._begun = False
        """The call of `fit` that runs has begun an epoch."""
        self._resuming = False
        """The loop's function was called again, and no epoch has begun since."""
        self._events = 0
        self._epoch_begin: EpochBegin | None = None

    # --- called by a state ------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        return self._snapshot() if self._begun else self._kept

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
        self._kept = snapshot._replace(values=kept)
        self._epoch_begin = snapshot.epoch_begin
        if self._begun:
            self._put()
        elif snapshot.begun:
            self._resuming = True

    def left(self) -> None:
        """Handle the end of the loop's function by an error, perhaps in the middle of `fit`."""
        if self._begun:
            self._kept = self._snapshot()
        self._begun = False
        self._resuming = self._kept.begun

    @contextmanager
    def again(self, progress_after: Mapping[str, int]) -> Iterator[None]:
        """In this context, copies of the state are of a `fit` that is called again after a loss, and ends at once."""
        plain, self._kept = self._kept, self._kept._replace(progress_after=progress_after)
        try:
            yield
        finally:
            self._kept = plain

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
            **dict.fromkeys(("on_epoch_end", "on_test_begin", "on_test_end"), self._event),
        }
        for name, function in around.items():
            setattr(callbacks, name, partial(function, callbacks, getattr(callbacks, name)))

    def _train_begins(self, callbacks: Any, plain: Callable[..., Any], *args: Any, **logs: Any) -> None:
        self._begun = False
        self._watched = {}
        for callback in callbacks.callbacks:
            if self._resuming and isinstance(getattr(callback, "append", None), bool):
                callback.append = True  # keep the rows written before
        plain(*args, **logs)
        self._watched = {key: _WatchedCallback(callback) for key, callback in _by_key(callbacks.callbacks)}
        kept = self._kept
        stopped = kept.stopped_at is not None and kept.stopped_at == self._epoch()
        if self._resuming and (stopped or (kept.progress_after is not None and _has_epochs())):
            self._put()
            callbacks.model._initial_epoch = sys.maxsize  # this call has ended before: no epoch is left

    def _epoch_begins(self, callbacks: Any, plain: Callable[..., Any], *args: Any, **logs: Any) -> None:
        if not self._begun:
            self._begun = True
            if self._resuming and not self._kept.ended:
                self._put()
            else:
                self._kept, self._changing, self._epoch_begin = Snapshot(), {}, None
            self._resuming = False
        epoch, rate = self._epoch(), learning_rate_of(getattr(callbacks.model, "optimizer", None))
        if epoch is None or rate is None:
            self._event(callbacks, plain, *args, **logs)
            return
        # An epoch that is entered again begins with the rate it has begun with, or a callback that multiplies the rate
        # would do so once more. If it then has the same rate as before, changes within the epoch are kept.
        now, earlier = float(rate.numpy()), self._epoch_begin
        again = earlier is not None and earlier.epoch == epoch
        begin = EpochBegin(epoch, earlier.before if earlier is not None and again else now, 0.0)
        rate.assign(begin.before)
        self._event(callbacks, plain, *args, **logs)
        self._epoch_begin = begin._replace(after=float(rate.numpy()))
        if again and self._epoch_begin == earlier:
            rate.assign(now)

    def _batch_ends(self, callbacks: Any, plain: Callable[..., Any], *args: Any, **logs: Any) -> None:
        plain(*args, **logs)
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
            progress = self._kept.progress_after
        self._event(callbacks, plain, *args, **logs)
        if self._begun:
            self._kept = Snapshot(True, True, self._epoch() if stopped else None, self._values())
        elif self._resuming and self._kept.ended:
            self._put()  # the History, for one, of a call that was complete
        self._begun = False
        if progress is not None:
            self._kept = self._kept._replace(progress_after=None)
            self.set_progress(progress)
        then, self.after_training = self.after_training, None
        if then is not None:
            then()
        self.detached()

    # --- values -------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return Snapshot(True, values=self._values(), epoch_begin=self._epoch_begin)

    def _values(self) -> dict[str, Values]:
        """Return copies of the values that each callback has changed."""
        found = {}
        for key, watched in self._watched.items():
            if watched.copied is None or watched.acts_on_batches or watched.copied[0] != self._events:
                watched.copied = self._events, self._changed(key, watched)
            found[key] = watched.copied[1]
        return found

    def _changed(self, key: str, watched: _WatchedCallback) -> Values:
        values, missing = plain_values(watched.callback), object()
        changing = self._changing.setdefault(key, set())
        changing |= {name for name, value in values.items() if not same(value, watched.at_begin.get(name, missing))}
        return {name: values[name] for name in changing if name in values}

    def _put(self) -> None:
        for key, watched in self._watched.items():
            put_values(watched.callback, self._kept.values.get(key, {}))
            watched.copied = None


def _has_epochs() -> bool:
    """Return False if the `fit` that is running was called with no epoch to train."""
    _, given = calling_method(lambda owner: isinstance(owner, keras.Model), ("fit",), within=_ABOVE)
    return not given or given["initial_epoch"] < given["epochs"]


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
    leave out; the state goes on counting. If several callbacks report the same batch or epoch, it is counted once.
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
        self._running: tuple[Any, list[Any], list[Any]] | None = None
        """When the loop was last left: the epoch, the variables of the model's metrics, and their values."""
        self.train_begins()

    # --- called by callbacks --------------------------------------------------------------------

    def train_begins(self) -> None:
        self.batches = 0
        """Batches done since `fit` was entered."""
        self._offset: int | None = None
        """The state's number of an epoch minus that of Keras; None before the first epoch of this call."""
        self._batches_before = 0
        self._ended: int | None = None
        self._before_end: dict[str, int] = {}
        """What the state has counted before the end of the epoch that has ended last."""
        self._last: int | None = None

    def epoch_begins(self, epoch: int, model: Any, epochs: int | None = None) -> None:
        """Handle the beginning of the epoch to which Keras gives this number; `epochs` is the argument of `fit`."""
        if self._offset is None:
            self._offset = self._state.epoch - epoch if self.counts_epochs else 0
            if self.counts_epochs and epochs is not None:
                self._plan(epochs + self._offset)
            self._batches_before = self._state.batch if self.counts_batches else 0
            self._put_running_metrics_back()
        elif self._ended is not None:
            self._batches_before = 0
        self._ended = self._last = None
        set_resume_point(model, FitResumePoint(self._offset, self._batches_before))

    def _plan(self, end: int) -> None:
        """Note the state's epoch at which this `fit` ends; warn if it is later than before `fit` was left."""
        if self._planned is not None and end > self._planned:
            log.warning(
                "model.fit was entered again and now trains until epoch %d; before, it was until epoch %d. Keras "
                "counts epochs anew in each call: give fit initial_epoch=state.epoch, or epochs=n - state.epoch",
                end,
                self._planned,
            )
        self._planned = end

    def batch_ends(self, batch: int) -> None:
        if self._last == batch:
            return
        self._last = batch
        if self.counts_batches:
            self._state.batch = self._batches_before + batch + 1
        self.batches += 1

    def epoch_ends(self, epoch: int) -> None:
        if self._ended == epoch:
            return
        self._ended = epoch
        self._before_end = self._progress()
        if self.counts_epochs:
            self._state.epoch = epoch + (self._offset or 0) + 1
        if self.counts_batches:
            self._state.batch = 0

    @contextmanager
    def end_undone(self) -> Iterator[None]:
        """In this context, the state counts as before the end of the epoch that has ended last."""
        after = self._progress()
        self.set_progress(self._before_end)
        try:
            with self._state.fit_callbacks.again(after):
                yield
        finally:
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
        counting = self._metrics_variables()
        self._running = self._state.__dict__.get("epoch"), counting, backend.copy_values(counting)

    def _put_running_metrics_back(self) -> None:
        """Restore the metrics of the epoch that was left, so that they are those of all its batches."""
        running, self._running = self._running, None
        state = self._state.__dict__
        if running is None or running[0] != state.get("epoch") or not state.get("batch"):
            return
        _, counting, copies = running
        if [id(variable) for variable in counting] == [id(variable) for variable in self._metrics_variables()]:
            backend.restore_values(counting, copies)

    def _metrics_variables(self) -> list[Any]:
        return list(getattr(self._state.__dict__.get("model"), "metrics_variables", ()))


def session_of(state: Any) -> FitSession:
    """Return the session of a `KerasState` or `TensorFlowState`."""
    session: FitSession = state._steps.fit
    return session
