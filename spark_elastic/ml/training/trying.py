"""What a training can be checked for on the driver, whatever framework does it, before any worker starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

import cloudpickle

from spark_elastic.errors import InvalidSettingsError, NotPicklableError
from spark_elastic.ml.callbacks import Callback, Monitor
from spark_elastic.ml.history import FACTS
from spark_elastic.ml.training.lasting import callback_states
from spark_elastic.ml.training.spec import Training

T = TypeVar("T", bound=Training)


def travelled(training: T) -> T:
    """A copy, pickled as a whole, as it will travel: what is in it may refer to one another.

    Raises: NotPicklableError: with the name of the setting.
    """
    try:
        return cloudpickle.loads(cloudpickle.dumps(training))  # type: ignore[no-any-return]
    except Exception as error:
        for each in fields(training):
            value = getattr(training, each.name)
            try:
                cloudpickle.loads(cloudpickle.dumps(value))
            except Exception as why:
                raise NotPicklableError(
                    f"{each.name} ({type(value).__name__}) cannot be sent to the workers: {why}; what cannot be "
                    "pickled (locks, connections, open files) has to be made where it is first used"
                ) from error
        raise NotPicklableError(f"the training cannot be sent to the workers: {error}") from error


def check_names(metrics: Iterable[str]) -> None:
    """Raises: InvalidSettingsError: a metric has the name of another column of the history."""
    for name in metrics:
        if name in (*FACTS, "loss") or name.startswith("val_"):
            raise InvalidSettingsError(f"a metric cannot be called {name!r}: the history has a column of that name")


def row_of(training: Training, logs: Mapping[str, float]) -> dict[str, float]:
    """A row of the history, as far as its columns go. logs: of training, without what is known of each epoch."""
    row = dict.fromkeys(FACTS, 1.0) | dict(logs)
    return row | {f"val_{name}": value for name, value in logs.items()} if training.validates else row


def check_followed(callbacks: Sequence[Callback], row: Mapping[str, float]) -> None:
    """Raises: InvalidSettingsError: a callback follows a column that the history will not have."""
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, Monitor):
            monitor.value(row)


def check_states(callbacks: Sequence[Callback]) -> None:
    """Raises: InvalidSettingsError: what a callback keeps cannot be written to a checkpoint."""
    for callback, state in zip(callbacks, callback_states(callbacks), strict=True):
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InvalidSettingsError(
                f"the training's state cannot be written: state_dict() of {type(callback).__name__} is not for JSON: "
                f"{error}"
            ) from error
