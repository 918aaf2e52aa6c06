"""What may look at a training and steer it: a small protocol, and the callbacks that come with it.

Every callback runs in every worker, with equal logs; what is done once for all (printing, writing) is done where
`run.rank == 0`. A worker may be lost at any moment, so what was begun may be called again by those that are left:
`on_epoch_end` of one epoch runs at least once in every worker that is there when the epoch ends, with the state that
the callback had before. The state of a callback is what its `state_dict` returns: plain values that JSON can hold.
It survives the loss of workers, reaches newcomers, and is part of checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.reporting.history import History

Logs = Mapping[str, float | int]


class Run(Protocol):
    """The training, as callbacks see it.

    epoch: from 0. step: optimizer steps that were applied. history: without the present epoch.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def history(self) -> History: ...
    @property
    def logs(self) -> Logs:
        """What the steps of this epoch have measured so far. Computed when it is asked for."""

    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...

    def stop(self, reason: str) -> None:
        """End the training: after this epoch in `on_epoch_end`, after one more step in `on_batch_end`. Any worker may
        ask for it."""

    def checkpoint(self, *, best: bool = False) -> None:
        """Have a durable checkpoint written in the background. best: this epoch is the best so far; its checkpoint is
        kept until the next that is, and so are its weights. For `on_epoch_end`, and in all workers alike."""

    def restore_best(self) -> None:
        """Give the trained model the weights of the best epoch. For `on_fit_end`, and in all workers alike."""


class Callback:
    """Override what you need. Nothing here may call a collective."""

    restores_best: bool = False
    """Whether it calls `run.restore_best`: then every worker keeps a copy of the best weights in memory."""

    def on_fit_begin(self, run: Run) -> None:
        """Once in every process, when it has the state and before its first step."""

    def on_epoch_begin(self, run: Run) -> None: ...

    def on_batch_begin(self, run: Run) -> None:
        """Before each optimizer step: keep it cheap."""

    def on_batch_end(self, run: Run) -> None:
        """After each optimizer step: keep it cheap."""

    def on_validation_begin(self, run: Run) -> None:
        """The epoch's steps were done, and the validation split is going to be evaluated."""

    def on_validation_end(self, run: Run, logs: Logs) -> None:
        """The validation split has been evaluated; `logs` has its "val_…" values only."""

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        """`logs` is the row that the history gets."""

    def on_fit_end(self, run: Run) -> None:
        """The last step was done; the model has not been written yet."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def followed_value(callback: Callback) -> str:
    """By what its best epoch is the best: a column of the history, or the callback itself."""
    monitor = getattr(callback, "monitor", None)
    return f"{monitor.name} {monitor.mode}" if isinstance(monitor, Monitor) else type(callback).__qualname__


def check_one_best(callbacks: Sequence[Callback]) -> None:
    """Raises: InvalidSettingsError: two callbacks would give the trained model the weights of different epochs."""
    restoring = list(dict.fromkeys(followed_value(callback) for callback in callbacks if callback.restores_best))
    if len(restoring) > 1:
        raise InvalidSettingsError(
            f"the trained model cannot have the weights of the best epoch by {' and by '.join(restoring)}; only one "
            "callback may restore them: restore=False, or restore_best=False, for the others"
        )


class LambdaCallback(Callback):
    """A callback from functions: `LambdaCallback(on_epoch_end=lambda run, logs: print(logs))`.

    Raises: InvalidSettingsError: there is no such event.
    """

    def __init__(self, **functions: Callable[..., None]) -> None:
        events = [name for name in vars(Callback) if name.startswith("on_")]
        for name, function in functions.items():
            if name not in events:
                hint = nearest(name, events)
                raise InvalidSettingsError(f"{name} is no event" + (f"; did you mean {hint}?" if hint else ""))
            setattr(self, name, function)


class Monitor:
    """Follows one value: whether it is better than all before. `best` is None before the first."""

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
        """Raises: InvalidSettingsError: the logs have no such value."""
        if self.name not in logs:
            raise InvalidSettingsError(f"there is no {self.name!r} to monitor; there are {', '.join(logs)}")
        return float(logs[self.name])

    def improved(self, logs: Logs) -> bool:
        """Whether this is the best so far by more than `min_delta`; it is then remembered. NaN never is."""
        value = self.value(logs)
        if math.isnan(value):
            return False
        gain = math.inf if self.best is None else (self.best - value if self.mode == "min" else value - self.best)
        if gain <= self.min_delta:
            return False
        self.best = value
        return True


class EarlyStopping(Callback):
    """Stop when a value has not become better for `patience` epochs in a row.

    Args:
        monitor: a column of the history.
        mode: "min" or "max"; "auto": "min" for what is called a loss or an error.
        min_delta: what counts as better.
        restore_best: the trained model gets the weights of the best epoch, which are then written as a checkpoint.
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
            run.stop(f"{self.monitor.name} has not become better than {self.monitor.best} in {self.waited} epochs")

    def on_fit_end(self, run: Run) -> None:
        if self.restores_best and self.monitor.best is not None:
            run.restore_best()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.monitor.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.monitor.best, self.waited = state["best"], state["waited"]


class BestCheckpoint(Callback):
    """Keep a durable checkpoint of the best epoch, and give the trained model its weights.

    Args:
        monitor, mode, min_delta: as for `EarlyStopping`.
        restore: False: the trained model keeps the weights of the last step.
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
    """Write the history to a file after every epoch: `.csv`, or JSON lines with any other ending.

    It is written anew from the history each time, so no row is lost or doubled when workers are.

    Args:
        path: on a file system that rank 0 can reach, whichever worker that is.
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
