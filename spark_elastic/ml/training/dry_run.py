"""What a training can be checked for on the driver, whatever framework does it, before any worker starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import cloudpickle

from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError, SparkElasticError
from spark_elastic.ml.callbacks import Callback, Monitor
from spark_elastic.ml.training.checkpoint_schedule import callback_states
from spark_elastic.ml.training.spec import Training
from spark_elastic.reporting.history import FACTS

# Errors of users' code on the first rows, with what the code was called with.


class explained:
    """A context in which the user's code runs.

    tensors: by name, those that it is called with.
    Raises: DataError: it raised something. InvalidSettingsError: as it is.
    """

    def __init__(self, what: str, rows: int, tensors: Mapping[str, Any]) -> None:
        self._what, self._rows, self._tensors = what, rows, tensors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, InvalidSettingsError):
            return
        seen = ", ".join(f"{name} {described_tensor(value)}" for name, value in self._tensors.items())
        said = str(error) if isinstance(error, SparkElasticError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self._what} cannot deal with the first {self._rows} rows: {said}\nThe tensors were: {seen}. What does "
            "not fit can be changed by input_dtypes, input_shapes, label_shapes, the columns' types or a "
            "transformation_fn"
        ) from error


def described_tensor(value: Any) -> str:
    """Type and shape of a tensor or array; of anything else its type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    return type(value).__name__


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
