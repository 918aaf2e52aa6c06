"""Checks of a training on the driver, before any worker starts, whatever framework it is for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import cloudpickle

from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError, SparkElasticError
from spark_elastic.ml.callbacks import Callback, Monitor
from spark_elastic.ml.outputs import OutputShape
from spark_elastic.ml.training.saving import callback_states
from spark_elastic.ml.training.spec import Training
from spark_elastic.reporting.history import FACTS

log = logging.getLogger("spark_elastic.ml")

T = TypeVar("T", bound=Training)


@dataclass(frozen=True)
class DryRunResult:
    """The result of one step on the first rows.

    Attributes:
        outputs: The model's outputs in `transform`; empty if it has none there.
        rule: The rule by which the loss makes a prediction of the first output; None if it has none.
        why_not: Why the model cannot be called in `transform`; "" if it can.
    """

    outputs: tuple[OutputShape, ...]
    rule: str | None = None
    why_not: str = ""


class UserCodeContext:
    """A context for calling the user's code: errors name the code and the tensors that it was called with.

    Args:
        subject: The code that is called, such as "the model and its loss".
        tensors: The tensors that it is called with, by name.

    Raises:
        DataError: The code raised something other than an `InvalidSettingsError`.
    """

    def __init__(self, subject: str, rows: int, tensors: Mapping[str, Any]) -> None:
        self._subject, self._rows, self._tensors = subject, rows, tensors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, InvalidSettingsError):
            return
        seen = ", ".join(f"{name} {describe_tensor(value)}" for name, value in self._tensors.items())
        reason = str(error) if isinstance(error, SparkElasticError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self._subject} cannot deal with the first {self._rows} rows: {reason}\nThe tensors were: {seen}. What "
            "does not fit can be changed by input_dtypes, input_shapes, label_shapes, the columns' types or a "
            "transformation_fn"
        ) from error


def describe_tensor(value: Any) -> str:
    """Return type and shape of a tensor or array, and the class name of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    return type(value).__name__


def round_trip_pickle(training: T) -> T:
    """Return a copy, pickled as a whole as it will be sent to workers, since its objects may refer to one another.

    Raises:
        NotPicklableError: It cannot be pickled; names the setting.
    """
    try:
        return cloudpickle.loads(cloudpickle.dumps(training))  # type: ignore[no-any-return]
    except Exception as error:
        for each in fields(training):
            value = getattr(training, each.name)
            try:
                cloudpickle.loads(cloudpickle.dumps(value))
            except Exception as reason:
                raise NotPicklableError(
                    f"{each.name} ({type(value).__name__}) cannot be sent to the workers: {reason}; create what cannot "
                    "be pickled (locks, connections, open files) where it is first used"
                ) from error
        raise NotPicklableError(f"the training cannot be sent to the workers: {error}") from error


def check_metric_names(metrics: Iterable[str]) -> None:
    """Raise `InvalidSettingsError` if a metric has the name of another column of the history."""
    for name in metrics:
        if name in (*FACTS, "loss") or name.startswith("val_"):
            raise InvalidSettingsError(f"a metric cannot be called {name!r}: the history has a column of that name")


def warn_of_averaged_metrics(metrics: Sequence[str], alternative: str) -> None:
    """Warn of metrics that are functions which return one number for all rows that they are given."""
    if metrics:
        log.warning(
            "the metric %s returns one number for the rows that it is given, which are a worker's share of a batch; "
            "these numbers are averaged, each by its rows. That is right for a mean over rows, such as an accuracy, "
            "and wrong for what is not one: AUC, F1, a root of a mean. Return a value for each row, or use %s",
            ", ".join(metrics),
            alternative,
        )


def history_row(training: Training, logs: Mapping[str, float]) -> dict[str, float]:
    """Return a row with the columns that the history will have, given the loss and metrics of training."""
    row = dict.fromkeys(FACTS, 1.0) | dict(logs)
    return row | {f"val_{name}": value for name, value in logs.items()} if training.validates else row


def check_monitored_columns(callbacks: Sequence[Callback], row: Mapping[str, float]) -> None:
    """Raise `InvalidSettingsError` if a callback monitors a column that the history will not have."""
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, Monitor):
            monitor.value(row)


def check_callback_states(callbacks: Sequence[Callback]) -> None:
    """Raise `InvalidSettingsError` if the state of a callback cannot be written to a checkpoint."""
    for callback, state in zip(callbacks, callback_states(callbacks), strict=True):
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InvalidSettingsError(
                f"state_dict() of {type(callback).__name__} must return values that JSON can hold, because it is part "
                f"of checkpoints: {error}"
            ) from error


def warn_of_local_batch_statistics(layers: Sequence[str], method: str, alternative: str) -> None:
    """Warn of layers whose batch statistics stay those of each worker's own rows."""
    if layers:
        log.warning(
            "batch statistics of %s are not synchronised, because the class overrides %s: the result of the training "
            "will depend on the number of workers. Use %s, or set sync_batch_norm=False to accept it",
            ", ".join(layers),
            method,
            alternative,
        )
