"""Adapt callbacks of Keras to the events of an elastic training.

Callbacks are called in every worker, with equal logs, at the same moments as in `model.fit`. Those that write files
(`RANK_0_ONLY`, their subclasses, and any with `rank_0_only = True`) are called on rank 0 only; when rank 0 is lost, the
worker that takes over this rank calls them. Attributes that are plain values and arrays survive the loss of workers,
are sent to new workers and are part of checkpoints, see `spark_elastic.keras.callback_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.keras.callback_state import CallbackSnapshot, refuse
from spark_elastic.ml.callbacks import Callback, Logs, Run, check_kinds
from spark_elastic.ml.training.spec import Training
from spark_elastic.reporting.history import FACTS

_WRITING = ("CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard")
RANK_0_ONLY = tuple(getattr(keras.callbacks, name) for name in _WRITING if hasattr(keras.callbacks, name))
"""The classes of these that the installed version of Keras has."""
REFUSED = {
    "BackupAndRestore": "set checkpoint_dir and run_id, which do the same for all workers together",
    "SwapEMAWeights": "the end of an epoch is repeated when a worker is lost, which would swap the weights back; give "
    "the optimizer use_ema=True instead, and the trained model has the averages",
}


class KerasCallback(Callback):
    """A callback of Keras as a `Callback`. Raises InvalidSettingsError if it cannot be used in an elastic training."""

    def __init__(self, wrapped: Any, training: Training, model: Any, shared: SharedLogs) -> None:
        refuse(wrapped, "an estimator", REFUSED, InvalidSettingsError)
        self.wrapped = wrapped
        self.rank_0_only = bool(getattr(wrapped, "rank_0_only", isinstance(wrapped, RANK_0_ONLY)))
        self._training = training
        self._model = model
        self._shared = shared
        self._begun = self._ended = False
        self._kept: CallbackSnapshot | None = CallbackSnapshot.of(wrapped, False)  # None: `wrapped` was called since
        self._at_begin = self._kept
        self.loaded_arrays: dict[str, Any] = {}  # the arrays for the next `load_state_dict`
        # Set only for callbacks that act on batches, because computing the logs of every batch costs time.
        if self._acts("on_train_batch_begin", "on_batch_begin"):
            self.on_batch_begin = self._on_batch_begin  # type: ignore[method-assign]
        if self._acts("on_train_batch_end", "on_batch_end"):
            self.on_batch_end = self._on_batch_end  # type: ignore[method-assign]
        self.acts_on_test_batches = self._acts("on_test_batch_begin", "on_test_batch_end")

    def _acts(self, *events: str) -> bool:
        if isinstance(self.wrapped, keras.callbacks.ModelCheckpoint) and self.wrapped.save_freq == "epoch":
            return False
        return any(not hasattr(getattr(self.wrapped, event), "_is_default") for event in events)

    def on_fit_begin(self, run: Run) -> None:
        self.run = run
        if not self.rank_0_only or run.rank == 0:
            self._begin(run)

    def on_epoch_begin(self, run: Run) -> None:
        self.call(run, "on_epoch_begin", run.epoch)

    def _on_batch_begin(self, run: Run) -> None:
        self.call(run, "on_train_batch_begin", _batch(run))

    def _on_batch_end(self, run: Run) -> None:
        self.call(run, "on_train_batch_end", _batch(run) - 1, dict(run.logs))

    def on_validation_begin(self, run: Run) -> None:
        self.call(run, "on_test_begin")

    def on_validation_end(self, run: Run, logs: Logs) -> None:
        self.call(run, "on_test_end", {name.removeprefix("val_"): value for name, value in logs.items()})

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        self.call(run, "on_epoch_end", run.epoch, self._shared.logs(logs))

    def on_fit_end(self, run: Run) -> None:
        if not self._ended:  # the end of a fit is repeated when a worker is lost in it
            self._ended = self.call(run, "on_train_end")

    def call(self, run: Run, event: str, *args: Any) -> bool:
        """Call the callback's method for an event, unless it runs on rank 0 only; return whether it was called."""
        if self.rank_0_only and run.rank != 0:
            return False
        if not self._begun:
            self._begin(run)
        getattr(self.wrapped, event)(*args)
        self._kept = None
        if self._model.stop_training:
            self._model.stop_training = False  # reset, so that a later callback can set it again
            run.stop(f"{type(self.wrapped).__name__} has set model.stop_training")
        return True

    def _begin(self, run: Run) -> None:
        wrapped, kept = self.wrapped, self._kept
        self._begun = True
        wrapped.set_model(self._model)
        rows, size = self._training.dataset.rows("train"), self._training.batch_size
        steps = None if size is None else -(-rows // size)  # None: they depend on the number of workers
        wrapped.set_params({"verbose": self._training.verbose, "epochs": run.epochs, "steps": steps})
        if hasattr(wrapped, "append") and (run.step or run.epoch):
            wrapped.append = True  # keep the rows that were written before the resume
        wrapped.on_train_begin()
        if kept is not None and kept.begun:
            kept.put_into(wrapped)
        self._kept = None
        self._at_begin = self.kept

    @property
    def kept(self) -> CallbackSnapshot:
        if self._kept is None:
            self._kept = CallbackSnapshot.of(self.wrapped, self._begun)
        return self._kept

    @kept.setter
    def kept(self, kept: CallbackSnapshot) -> None:
        if self._begun and kept is not self._kept:
            # a snapshot that is not begun holds the values from before the first event
            kept = kept if kept.begun else self._at_begin
            kept.put_into(self.wrapped)
        self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept.to_json({}, "")

    def arrays(self) -> dict[str, Any]:
        """Return the arrays that `state_dict` refers to by name."""
        found: dict[str, Any] = {}
        self.kept.to_json(found, "")
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = CallbackSnapshot.from_json(state, self.loaded_arrays)
        self.loaded_arrays = {}


class SharedLogs:
    """One dict of an epoch's logs that all callbacks of Keras share: one may add an entry that a later one reads."""

    def __init__(self) -> None:
        self._row: Logs = {}
        self._logs: dict[str, Any] = {}

    def logs(self, row: Logs) -> dict[str, Any]:
        if row is not self._row:
            self._row, self._logs = row, {name: value for name, value in row.items() if name not in FACTS}
        return self._logs


class KerasCallbacks:
    """All callbacks of a training, and the learning rate that they may change, as one value of the elastic state."""

    def __init__(self, callbacks: Sequence[Callback], model: Any) -> None:
        self._callbacks = list(callbacks)
        self._model = model
        self._adapted = {str(at): one for at, one in enumerate(callbacks) if isinstance(one, KerasCallback)}
        self._of_test_batches = [one for one in self._adapted.values() if one.acts_on_test_batches]

    @contextmanager
    def test_batch(self, number: int) -> Iterator[None]:
        for one in self._of_test_batches:
            one.call(one.run, "on_test_batch_begin", number)
        yield
        for one in self._of_test_batches:
            one.call(one.run, "on_test_batch_end", number)

    def agree(self, rank: int, size: int) -> None:
        """Broadcast the attributes of those callbacks that run only on rank 0 from rank 0 to all other workers."""
        alone = {at: one for at, one in self._adapted.items() if one.rank_0_only}
        if size < 2 or not alone:
            return
        kept = broadcast_object({at: one.kept for at, one in alone.items()}, 0)
        if rank != 0:
            for at, one in alone.items():
                one.kept = kept[at]

    def state_dict(self) -> dict[str, Any]:
        states = {
            str(at): one.kept if isinstance(one, KerasCallback) else one.state_dict()
            for at, one in enumerate(self._callbacks)
        }
        return {"states": states, "learning_rate": _learning_rate(self._model.optimizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for at, one in enumerate(self._callbacks):
            own = state["states"][str(at)]
            if isinstance(one, KerasCallback):
                one.kept = own
            else:
                one.load_state_dict(own)
        if state["learning_rate"] is not None and state["learning_rate"] != _learning_rate(self._model.optimizer):
            self._model.optimizer.learning_rate = state["learning_rate"]

    def arrays(self) -> dict[str, Any]:
        return {f"{at}/{name}": array for at, one in self._adapted.items() for name, array in one.arrays().items()}

    def load_arrays(self, arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            at, _, own = name.partition("/")
            self._adapted[at].loaded_arrays[own] = array


def adapt_callbacks(callbacks: Sequence[Any], training: Training, model: Any) -> list[Callback]:
    """Return this package's callbacks unchanged, Keras's as `KerasCallback`."""
    check_callbacks(callbacks)
    shared = SharedLogs()
    return [one if isinstance(one, Callback) else KerasCallback(one, training, model, shared) for one in callbacks]


def check_callbacks(callbacks: Sequence[Any]) -> None:
    names = "spark_elastic.ml.callbacks.Callback, keras.callbacks.Callback"
    check_kinds(callbacks, (Callback, keras.callbacks.Callback), names)


def _learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate; None if it follows a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def _batch(run: Run) -> int:
    """Return the number of steps of this epoch so far."""
    return run.step - int(run.history[-1]["steps"] if len(run.history) else 0)
