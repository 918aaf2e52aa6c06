"""Callbacks of Keras in a training of ours.

They are called in every worker, with equal logs, at the moments at which `model.fit` calls them. Those of Keras that
write (`RANK_0_ONLY`, their subclasses, and any that says `rank_0_only = True`) are called where the rank is 0: on
whoever has it then, after the loss of the worker that had it before. What they remember in plain values and arrays
outlives the loss of workers, reaches newcomers and is part of checkpoints, see `callback_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.keras.callback_state import CallbackSnapshot
from spark_elastic.ml.callbacks import Callback, Logs, Run
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.reporting.history import FACTS

_WRITING = ("CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard")
RANK_0_ONLY = tuple(getattr(keras.callbacks, name) for name in _WRITING if hasattr(keras.callbacks, name))
"""Versions of Keras differ in which they have."""
REFUSED = {
    "BackupAndRestore": "checkpoint_dir and run_id do what it is for, for all workers together",
    "SwapEMAWeights": "an epoch's end may be done again when a worker is lost, which would swap the weights back; "
    "the optimizer's use_ema=True gives the trained model the averages",
}


class KerasCallback(Callback):
    """Stands for a callback of Keras.

    Raises: InvalidSettingsError: one that cannot be used here.
    """

    def __init__(self, wrapped: Any, training: KerasTraining, model: Any, shared: SharedLogs) -> None:
        for name, why in REFUSED.items():
            if isinstance(wrapped, getattr(keras.callbacks, name, ())):
                raise InvalidSettingsError(f"the callback {name} cannot be used in an estimator: {why}")
        self.wrapped = wrapped
        self.rank_0_only = bool(getattr(wrapped, "rank_0_only", isinstance(wrapped, RANK_0_ONLY)))
        self._training = training
        self._model = model
        self._shared = shared
        self._run: Run | None = None
        self._begun = self._ended = False
        self._kept: CallbackSnapshot | None = CallbackSnapshot.of(wrapped, False)
        """None: it was called since."""
        self._at_begin = self._kept
        self._loaded: dict[str, Any] = {}
        # Most do nothing at every batch, and logs of every batch cost time.
        if self._acts("on_train_batch_begin", "on_batch_begin"):
            self.on_batch_begin = self._on_batch_begin  # type: ignore[method-assign]
        if self._acts("on_train_batch_end", "on_batch_end"):
            self.on_batch_end = self._on_batch_end  # type: ignore[method-assign]
        self.acts_on_test_batches = self._acts("on_test_batch_begin", "on_test_batch_end")

    def _acts(self, *events: str) -> bool:
        if isinstance(self.wrapped, keras.callbacks.ModelCheckpoint) and self.wrapped.save_freq == "epoch":
            return False
        return any(not hasattr(getattr(self.wrapped, event), "_is_default") for event in events)

    # --- events -----------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        self._run = run
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
        self.call(run, "on_epoch_end", run.epoch, self._shared.of(logs))

    def on_fit_end(self, run: Run) -> None:
        if self.call(run, "on_train_end", once=not self._ended):
            self._ended = True

    def on_test_batch(self, event: str, number: int) -> None:
        assert self._run is not None
        self.call(self._run, event, number)

    def call(self, run: Run, event: str, *args: Any, once: bool = True) -> bool:
        """Have it told of an event, if it is told of any here; whether it was.

        once: False: it was told before, and not again.
        """
        if (self.rank_0_only and run.rank != 0) or not once:
            return False
        if not self._begun:
            self._begin(run)
        getattr(self.wrapped, event)(*args)
        self._kept = None
        if self._model.stop_training:
            self._model.stop_training = False  # each that asks for the end is heard
            run.stop(f"{type(self.wrapped).__name__} has set model.stop_training")
        return True

    def _begin(self, run: Run) -> None:
        wrapped, kept = self.wrapped, self._kept
        self._begun = True
        wrapped.set_model(self._model)
        wrapped.set_params({"verbose": self._training.verbose, "epochs": run.epochs, "steps": _batches(self._training)})
        if hasattr(wrapped, "append") and (run.step or run.epoch):
            wrapped.append = True  # what was written before is not to be lost
        wrapped.on_train_begin()
        if kept is not None and kept.begun:
            kept.put_into(wrapped)
        self._kept = None
        self._at_begin = self.kept

    # --- what it remembers ------------------------------------------------------------------------

    @property
    def kept(self) -> CallbackSnapshot:
        if self._kept is None:
            self._kept = CallbackSnapshot.of(self.wrapped, self._begun)
        return self._kept

    @kept.setter
    def kept(self, kept: CallbackSnapshot) -> None:
        if self._begun:
            if kept is not self._kept:
                # from before it had begun: of this process, or of one that has gone
                (kept if kept.begun else self._at_begin).put_into(self.wrapped)
                self._kept = kept if kept.begun else self._at_begin
        else:
            self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept.to_json({}, "")

    def arrays(self) -> dict[str, Any]:
        """Those that the state refers to by name."""
        found: dict[str, Any] = {}
        self.kept.to_json(found, "")
        return found

    def take_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Those that the state refers to that is loaded next."""
        self._loaded = dict(arrays)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = CallbackSnapshot.from_json(state, self._loaded)
        self._loaded = {}


class SharedLogs:
    """The logs of an epoch as one dict for all callbacks of Keras: some put a learning rate there for others."""

    def __init__(self) -> None:
        self._row: Logs = {}
        self._logs: dict[str, Any] = {}

    def of(self, row: Logs) -> dict[str, Any]:
        if row is not self._row:
            self._row, self._logs = row, {name: value for name, value in row.items() if name not in FACTS}
        return self._logs


class KerasCallbacks:
    """All callbacks of a training, ours and those that stand for Keras's, as a value of its state.

    A learning rate that they change is among what they remember.
    """

    def __init__(self, callbacks: Sequence[Callback], model: Any) -> None:
        self._callbacks = list(callbacks)
        self._model = model
        self._adapted = {str(at): one for at, one in enumerate(callbacks) if isinstance(one, KerasCallback)}
        self._of_test_batches = [one for one in self._adapted.values() if one.acts_on_test_batches]

    @contextmanager
    def test_batch(self, number: int) -> Iterator[None]:
        for one in self._of_test_batches:
            one.on_test_batch("on_test_batch_begin", number)
        yield
        for one in self._of_test_batches:
            one.on_test_batch("on_test_batch_end", number)

    def agree(self, rank: int, size: int) -> None:
        """What is called where the rank is 0 is remembered by all.

        Raises: HorovodInternalError.
        """
        alone = {at: one for at, one in self._adapted.items() if one.rank_0_only}
        if size < 2 or not alone:
            return
        told = broadcast_object({at: one.kept for at, one in alone.items()}, 0)
        if rank != 0:
            for at, one in alone.items():
                one.kept = told[at]

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

    def take_arrays(self, arrays: Mapping[str, Any]) -> None:
        for at, one in self._adapted.items():
            own = {name.removeprefix(f"{at}/"): array for name, array in arrays.items() if name.startswith(f"{at}/")}
            one.take_arrays(own)


def adapted(callbacks: Sequence[Any], training: KerasTraining, model: Any) -> list[Callback]:
    """Ours as they are, those of Keras as ours.

    Raises: InvalidSettingsError: something else, or one that cannot be used here.
    """
    made: list[Callback] = []
    shared = SharedLogs()
    for one in callbacks:
        if isinstance(one, Callback):
            made.append(one)
        elif isinstance(one, keras.callbacks.Callback):
            made.append(KerasCallback(one, training, model, shared))
        else:
            raise InvalidSettingsError(
                "callbacks must be a list of spark_elastic.ml.callbacks.Callback and keras.callbacks.Callback; "
                f"{one!r} is neither"
            )
    return made


def _learning_rate(optimizer: Any) -> float | None:
    """None: it follows a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def _batch(run: Run) -> int:
    """Steps that were done in this epoch."""
    return run.step - int(run.history[-1]["steps"] if len(run.history) else 0)


def _batches(training: KerasTraining) -> int | None:
    """Of an epoch; None: it depends on the number of workers."""
    rows, size = training.dataset.rows("train"), training.batch_size
    return None if size is None else -(-rows // size)
