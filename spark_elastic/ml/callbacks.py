"""Callbacks of a training: the protocol, and the callbacks that come with it.

Every callback runs in every worker, with equal logs; print and write only where `run.rank == 0`. When a worker is lost,
the others repeat what was interrupted: `on_epoch_end` of an epoch runs at least once in every worker that is there when
the epoch ends, each time with the state that the callback had before. The state of a callback is what its `state_dict`
returns, plain values that JSON can hold. It survives the loss of workers, is sent to workers that join, and is part of
checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.reporting.history import History

Logs = Mapping[str, float | int]


class Run(Protocol):
    """The training as callbacks see it.

    Attributes:
        epoch: The present epoch, counted from 0.
        step: Optimizer steps that were applied.
        history: The epochs that have ended.
    """

    rank: int
    size: int
    epochs: int
    model: Any
    optimizer: Any

    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def history(self) -> History: ...
    @property
    def logs(self) -> Logs:
        """Loss and metrics of this epoch's steps so far. Computed on access."""

    def stop(self, reason: str) -> None:
        """End the training: after this epoch in `on_epoch_end`, after one more step in `on_batch_end`.

        Any worker may call it. Other workers hear of a request of `on_batch_end` in the next step's reduction: if all
        workers that have made it are lost before, it is lost with them. So make it in all workers if all have the
        reason, or again at the next event.
        """

    def checkpoint(self, *, best: bool = False) -> None:
        """Write a durable checkpoint in the background. Call it in `on_epoch_end`, in all workers alike.

        Args:
            best: This epoch is the best so far; its checkpoint and weights are kept until a better one.
        """

    def restore_best(self) -> None:
        """Give the trained model the weights of the best epoch. Call it in `on_fit_end`, in all workers alike."""


class Callback:
    """Base of callbacks: override the events that you need. Events must not call collectives."""

    restores_best: bool = False
    """True if the callback calls `run.restore_best`: every worker then keeps a copy of the best weights in memory."""

    def on_fit_begin(self, run: Run) -> None:
        """Called once in every process, when it has the state and before its first step."""

    def on_epoch_begin(self, run: Run) -> None: ...

    def on_batch_begin(self, run: Run) -> None:
        """Called before each optimizer step: keep it cheap."""

    def on_batch_end(self, run: Run) -> None:
        """Called after each optimizer step: keep it cheap."""

    def on_validation_begin(self, run: Run) -> None:
        """Called after the epoch's steps, before the validation split is evaluated."""

    def on_validation_end(self, run: Run, logs: Logs) -> None:
        """Called with the "val_…" values once the validation split is evaluated."""

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        """Called with the epoch's row of the history."""

    def on_fit_end(self, run: Run) -> None:
        """Called after the last step, before the model is written."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state as plain values that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def followed_value(callback: Callback) -> str:
    """Return the name of the value by which a callback finds the best epoch: monitored column and mode, or class."""
    monitor = getattr(callback, "monitor", None)
    return f"{monitor.name} {monitor.mode}" if isinstance(monitor, Monitor) else type(callback).__qualname__


def check_one_best(callbacks: Sequence[Callback]) -> None:
    """Raise `InvalidSettingsError` if two callbacks would restore the weights of different epochs."""
    restoring = list(dict.fromkeys(followed_value(callback) for callback in callbacks if callback.restores_best))
    if len(restoring) > 1:
        raise InvalidSettingsError(
            f"the trained model cannot have the weights of the best epoch by {' and by '.join(restoring)}; let only "
            "one callback restore them, with restore=False or restore_best=False for the others"
        )


def check_kinds(callbacks: Sequence[Any], kinds: tuple[type, ...], names: str) -> None:
    """Raise `InvalidSettingsError` if a callback that travels to the workers is of none of these kinds."""
    for each in callbacks:
        if not isinstance(each, kinds):
            raise InvalidSettingsError(
                f"callbacks must be a list of {names} and spark_elastic.DriverCallback, not of {each!r}"
            )


class LambdaCallback(Callback):
    """A callback made of functions: `LambdaCallback(on_epoch_end=lambda run, logs: print(logs))`.

    Raises:
        InvalidSettingsError: There is no such event.
    """

    def __init__(self, **functions: Callable[..., None]) -> None:
        events = [name for name in vars(Callback) if name.startswith("on_")]
        for name, function in functions.items():
            if name not in events:
                hint = nearest(name, events)
                raise InvalidSettingsError(f"{name} is not an event" + (f"; did you mean {hint}?" if hint else ""))
            setattr(self, name, function)


def validation_hint(name: str, columns: Iterable[str]) -> str:
    """Return how to get a column of the validation, as the end of a sentence; "" if `name` is not one, or there are."""
    if not name.startswith("val_") or any(column.startswith("val_") for column in columns):
        return ""
    return "; columns that begin with val_ need a validation: validation=0.1 sets a tenth of the rows aside"


class Monitor:
    """Follows one value of the logs and remembers the best; `best` is None before the first."""

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise InvalidSettingsError(f'mode must be "auto", "min" or "max", not {mode!r}')
        self.name = name
        if mode == "auto":
            mode = "min" if any(word in name for word in ("loss", "error", "mse", "mae", "perplexity")) else "max"
        self.mode = mode
        self.min_delta = abs(min_delta)
        self.best: float | None = None

    def value(self, logs: Logs) -> float:
        """Return the followed value. Raises `InvalidSettingsError` if the logs do not have it."""
        if self.name not in logs:
            there = f"there are {', '.join(logs)}{validation_hint(self.name, logs)}"
            raise InvalidSettingsError(f"there is no {self.name!r} to monitor; {there}")
        return float(logs[self.name])

    def improved(self, logs: Logs) -> bool:
        """Return whether the value is the best so far by more than `min_delta`, and remember it. NaN never is."""
        value = self.value(logs)
        if math.isnan(value):
            return False
        gain = math.inf if self.best is None else (self.best - value if self.mode == "min" else value - self.best)
        if gain <= self.min_delta:
            return False
        self.best = value
        return True


class EarlyStopping(Callback):
    """Stops the training when a value has not improved for `patience` epochs in a row.

    Args:
        monitor: Column of the history to follow.
        mode: Whether smaller ("min") or larger ("max") is better; "auto": "min" for names of losses and errors.
        min_delta: Smallest improvement that counts.
        restore_best: Give the trained model the weights of the best epoch, and keep a checkpoint of it.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 3,
        mode: str = "auto",
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if patience < 0:
            raise InvalidSettingsError(f"patience must not be negative, but is {patience}")
        self.monitor = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.restores_best = restore_best
        self.waited = 0

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        if self.monitor.improved(logs):
            self.waited = 0
            if self.restores_best:
                run.checkpoint(best=True)
            return
        self.waited += 1
        if self.waited >= max(1, self.patience):
            run.stop(f"{self.monitor.name} has not improved on {self.monitor.best} in {self.waited} epochs")

    def on_fit_end(self, run: Run) -> None:
        if self.restores_best and self.monitor.best is not None:
            run.restore_best()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.monitor.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.monitor.best, self.waited = state["best"], state["waited"]


class BestCheckpoint(Callback):
    """Gives the trained model the weights of the best epoch; with `checkpoint_dir`, keeps a durable checkpoint of it.

    Args:
        monitor: As in `EarlyStopping`; so are `mode` and `min_delta`.
        restore: Give the trained model the weights of the best epoch; otherwise it has those of the last step.
    """

    def __init__(
        self, monitor: str = "val_loss", *, mode: str = "auto", min_delta: float = 0.0, restore: bool = True
    ) -> None:
        self.monitor = Monitor(monitor, mode, min_delta)
        self.restores_best = restore

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        if self.monitor.improved(logs):
            run.checkpoint(best=True)

    def on_fit_end(self, run: Run) -> None:
        if self.restores_best and self.monitor.best is not None:
            run.restore_best()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.monitor.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.monitor.best = state["best"]


class HistoryLogger(Callback):
    """Writes the history to a file after every epoch: `.csv`, or JSON lines with any other suffix.

    The whole file is written each time, so no row is lost or doubled when workers are lost.

    Args:
        path: A file that every worker can write, because rank 0 may be on any host.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        if run.rank != 0:
            return
        history = run.history.with_row(logs)
        if self.path.endswith(".csv"):
            names = history.names
            lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in history)]
        else:
            lines = [json.dumps(dict(row)) for row in history]
        target = Path(self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.unfinished")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(target)
