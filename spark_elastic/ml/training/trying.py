"""What a training can be checked for on the driver, whatever framework does it, before any worker starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

import cloudpickle

from spark_elastic.errors import InvalidSettingsError, NotPicklableError
from spark_elastic.ml.callbacks import Callback, Monitor
from spark_elastic.ml.history import FACTS
from spark_elastic.ml.training.lasting import callback_states
from spark_elastic.ml.training.spec import Training

log = logging.getLogger("spark_elastic.ml")

T = TypeVar("T", bound=Training)

log = logging.getLogger("spark_elastic.ml")


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


def say_averaged(metrics: Sequence[str], instead: str) -> None:
    """Say what becomes of metrics that are functions which return one number for all rows that they are given."""
    if metrics:
        log.warning(
            "the metric %s returns one number for the rows that it is given, which are a worker's share of a batch; "
            "these numbers are averaged, each by its rows. That is right for a mean over rows, such as an accuracy, "
            "and wrong for what is not one: AUC, F1, a root of a mean. Return a value for each row, or take %s",
            ", ".join(metrics),
            instead,
        )


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


def tell_unconverted(layers: Sequence[str], method: str, instead: str) -> None:
    """Warn of layers whose batch statistics will be those of each worker's own rows."""
    if layers:
        log.warning(
            "batch statistics of %s are not synchronised, because the class has a %s of its own: what is learnt will "
            "depend on the number of workers. Use %s, or set sync_batch_norm=False to accept it",
            ", ".join(layers),
            method,
            instead,
        )
