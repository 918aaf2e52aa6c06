"""Checks of a training on the driver, before any worker starts; the same for every framework.

`ml.torch.dry_run` and `ml.keras.dry_run` do one step of a copy of the training on its first rows, with these checks
around it.
"""

from __future__ import annotations

import inspect
import json
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spark_elastic.data.reader import Batch, least_cache_of_reader, resolve_order
from spark_elastic.data.remote_cache import check_cache_bytes
from spark_elastic.driver.pickled_call import pickled
from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError, SparkElasticError
from spark_elastic.ml.added_columns import OutputShape, suits
from spark_elastic.ml.callbacks import Callback, Monitor
from spark_elastic.ml.preparation import model_inputs, reshaped
from spark_elastic.ml.serving import has_rows
from spark_elastic.ml.training.saving import callback_states
from spark_elastic.ml.training.spec import Training
from spark_elastic.reporting.history import FACTS
from spark_elastic.task.user_frames import is_users
from spark_elastic.wire.pickling import round_trip

log = logging.getLogger("spark_elastic.ml")

ROWS = 4  # the number of rows that the step of a dry run takes

_MOST_ROWS, _MOST_BYTES = 251, 1 << 24

_PACKAGE = Path(__file__).parents[2]
_OF_CODE = (NameError, AttributeError, ImportError)

T = TypeVar("T", bound=Training)


@dataclass(frozen=True)
class DryRunResult:
    """The result of one step on the first rows; see `ml.model.Fitted` for all but the settings."""

    outputs: tuple[OutputShape, ...]
    rule: str | None = None
    why_not: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the training, such as the values that a model logs
    of_classes: bool = False  # the first label is one integer a row, and the first output has a value for each class
    output_positions: tuple[int, ...] = ()


@contextmanager
def user_code(subject: str, rows: int, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of the user's code that other tensors might avoid into a `DataError` with its tensors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, InvalidSettingsError) or _is_fault_of_code(error):
            raise
        seen = ", ".join(f"{name} {describe_tensor(value)}" for name, value in tensors.items())
        reason = str(error) if isinstance(error, SparkElasticError) else f"{type(error).__name__}: {_of_graph(error)}"
        raise DataError(
            f"{subject} cannot deal with the first {rows} rows: {reason}\nThe tensors were: {seen}. "
            "Change what does not fit: the model, or the tensors, with input_dtypes, input_shapes, label_shapes, the "
            "columns' types or a transformation_fn"
        ) from error


def _of_graph(error: Exception) -> str:
    """Return what an error says, without the stack that TensorFlow puts in front of it for an error in a graph."""
    said = str(error)
    lines = said.split("\n\t [[{{node")[0].rstrip().splitlines()
    return lines[-1] if said.startswith("Graph execution error:") and lines else said


def _is_fault_of_code(error: Exception) -> bool:
    """Return whether other tensors could not avoid an error. A TypeError is one if the user's own line raised it."""
    if isinstance(error, SparkElasticError):
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    if Path(innermost).is_relative_to(_PACKAGE):  # it answers the user's code, as `self.trainer` of Lightning does
        return False
    return isinstance(error, _OF_CODE) or (isinstance(error, TypeError) and is_users(innermost))


def describe_tensor(value: Any) -> str:
    """Return the type and shape of a tensor or array; the class name of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    return type(value).__name__


@contextmanager
def returned_model(name: str) -> Iterator[None]:
    """Raise `InvalidSettingsError` for an error in making what `fit` would return now of the trained model."""
    try:
        yield
    except InvalidSettingsError:
        raise
    except Exception as error:
        raise InvalidSettingsError(
            f"the trained {name} could not be returned from the workers: its weights after a step cannot be loaded "
            f"into the model that was given: {error}"
        ) from error


@contextmanager
def optimizer_errors(optimizer: Any, variables: str) -> Iterator[None]:
    """Turn an error of the optimizer's step into an InvalidSettingsError that names the optimizer."""
    try:
        yield
    except Exception as error:
        raise InvalidSettingsError(
            f"{type(optimizer).__name__} cannot change the model's {variables}: {type(error).__name__}: {error}"
        ) from error


def round_trip_pickle(training: T, remedies: Mapping[str, str] = {}) -> T:
    """Return a pickled copy of the whole, as parts share objects; NotPicklableError names the setting."""
    try:
        return round_trip(training)  # type: ignore[no-any-return]
    except Exception as error:
        for each in fields(training):
            value = getattr(training, each.name)
            try:
                round_trip(value)
            except Exception as reason:
                if inspect.isfunction(function := getattr(value, "function", value)):
                    try:
                        pickled(function)  # its error has the path to what the function refers to
                    except NotPicklableError as found:
                        raise NotPicklableError(f"{each.name}: {found}") from error
                remedy = remedies.get(
                    each.name, "create what cannot be pickled (locks, connections, open files) where it is first used"
                )
                raise NotPicklableError(
                    f"{each.name} ({type(value).__name__}) cannot be sent to the workers: {reason}; {remedy}"
                ) from error
        raise NotPicklableError(f"the training cannot be sent to the workers: {error}") from error


def rows_of_losses(bytes_a_row: int, least: int) -> int:
    """Return the number of rows on which a user's own loss is tried: many, as labels that it ignores may be rare."""
    return max(least, min(_MOST_ROWS, _MOST_BYTES // max(1, bytes_a_row)))


def check_order(training: Training) -> None:
    dataset, limit = training.dataset, training.cache_bytes
    resolve_order(dataset, order=training.order, shuffle=training.shuffle, cache_bytes=limit)
    if not dataset.store.is_local and limit is not None:  # workers read both splits, the second in order of the files
        rows = {"batch_size": training.batch_size or training.per_worker_batch_size or 1, "prefetch": training.prefetch}
        shuffled = {"train"} if training.shuffle else set()
        least = [least_cache_of_reader(dataset, each, shuffle=each in shuffled, **rows) for each in dataset.splits]
        check_cache_bytes(limit, sum(least), " and ".join(dataset.splits))


def check_metric_names(metrics: Iterable[str]) -> None:
    for name in metrics:
        if name in (*FACTS, "loss") or name.startswith("val_"):
            raise InvalidSettingsError(
                f"a metric cannot be called {name!r}: the history has a column of that name; choose another"
            )


def warn_of_no_prediction(result: DryRunResult) -> None:
    """Warn that `transform` will make no prediction although the labels are classes, if the loss has no rule for it."""
    if result.rule is None and result.of_classes:
        log.warning(
            "transform will add no column with a prediction, because the loss does not say how to make one of %d "
            "values a row. Set prediction='argmax' for the class with the largest value (of probabilities: "
            "'argmax_probability'), or prediction_col='' if none is needed",
            result.outputs[0].shape[0],
        )


def warn_of_averaged_metrics(metrics: Sequence[str], alternative: str) -> None:
    """Warn of metrics that return one number for all rows, which is averaged; `alternative`: metrics that are exact."""
    if metrics:
        log.warning(
            "the metric %s returns one number for the rows that it is given, which are a worker's share of a batch; "
            "these numbers are averaged, weighted by their rows. That is right for a mean over rows, such as an "
            "accuracy, and wrong for AUC, F1 or the root of a mean. Return a value for each row, or take %s",
            ", ".join(metrics),
            alternative,
        )


def warn_of_local_batch_statistics(names: Sequence[str], reason: str, remedy: str) -> None:
    """Warn of layers or buffers whose statistics are those of a worker's own rows."""
    if names:
        log.warning(
            "batch statistics of %s are not synchronised, because %s: the result will depend on the number of workers. "
            "%s to accept it",
            ", ".join([*names[:3], *["..."][: len(names) - 3]]),
            reason,
            remedy,
        )


def check_monitors(
    training: Training,
    callbacks: Sequence[Callback],
    logs: Mapping[str, float],
    val_logs: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return a row of the history; raise InvalidSettingsError if a callback, or the plan, monitors a missing column.

    Without the `val_logs` of a validation step, they are the `logs` with "val_".
    """
    row = dict.fromkeys(FACTS, 1.0) | dict(logs)
    if training.validates:
        row |= {f"val_{name}": value for name, value in logs.items()} if val_logs is None else dict(val_logs)
    for callback in (*callbacks, *training.plan_callbacks()):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, Monitor):
            monitor.value(row)
    return row


def check_callback_states(callbacks: Sequence[Callback]) -> None:
    """Raise InvalidSettingsError if the state of a callback cannot be written to a checkpoint."""
    for callback, state in zip(callbacks, callback_states(callbacks), strict=True):
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InvalidSettingsError(
                f"state_dict() of {type(callback).__name__} must return values that JSON can hold, because it is part "
                f"of checkpoints: {error}"
            ) from error


def try_transform(
    training: Training,
    batch: Batch,
    predict: Callable[[Mapping[str, Any]], Sequence[Any]],
    inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    rule: str | None,
) -> DryRunResult:
    """Call the model as `transform` calls it. A failure is a warning, because the training works without it."""
    features: dict[str, Any] = {
        field.name: reshaped(batch.tensors[field.name], field.shape, batch.rows)
        for field in model_inputs(training.dataset, training.input_shapes)
    }

    def called(times: int) -> Sequence[Any]:
        given = {
            name: np.concatenate([value] * times) if isinstance(value, np.ndarray) else value * times
            for name, value in features.items()
        }
        return predict(given if inference_fn is None else dict(inference_fn(given)))

    try:
        outputs = called(1)
        taken = [at for at, output in enumerate(outputs) if has_rows(output, batch.rows)]
        if len(outputs) > 1:  # another axis may have as many values as there are first rows
            twice = called(2)
            taken = [at for at in taken if has_rows(twice[at], 2 * batch.rows)]
        if not taken:
            seen = ", ".join(map(describe_tensor, outputs)) or "nothing"
            raise DataError(f"for {batch.rows} rows it returns {seen}, and no tensor with a value for each row")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if inference_fn is None and training.transformation_fn is not None:
            why += " (training saw the rows through transformation_fn; transform does so through inference_fn)"
        log.warning("transform will not work: the model cannot be called with its features alone: %s", why)
        return DryRunResult((), why_not=why)
    all_taken = len(taken) == len(outputs)
    if not all_taken:
        left = ", ".join(f"{at} ({describe_tensor(each)})" for at, each in enumerate(outputs) if at not in taken)
        log.warning("transform leaves out what the model returns without a value for each row: output %s", left)
        rule = rule if taken[0] == 0 else None
    shapes = tuple(OutputShape(outputs[at].dtype.str, outputs[at].shape[1:]) for at in taken)
    label, shape = batch.tensors.get("label_0"), shapes[0].shape
    whole = isinstance(label, np.ndarray) and label.dtype.kind in "iu" and label.ndim == 1
    of_classes = whole and len(shape) == 1 and shape != (1,)
    known = rule if rule is not None and suits(rule, shape) else None
    return DryRunResult(shapes, known, of_classes=of_classes, output_positions=() if all_taken else tuple(taken))
