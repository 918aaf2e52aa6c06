"""One step of a copy of the training on its first rows, on the driver: errors come before any worker starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from spark_elastic.data.reader import Batch, resolve_order
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.keras.sync_batch_normalization import unconverted
from spark_elastic.ml.callbacks import Callback, check_one_best
from spark_elastic.ml.datasets import model_inputs
from spark_elastic.ml.keras import losses
from spark_elastic.ml.keras.assembly import Prepared, prepared
from spark_elastic.ml.keras.callbacks import KerasCallback, adapted
from spark_elastic.ml.keras.compiling import losses_by_output
from spark_elastic.ml.keras.feeding import first_rows
from spark_elastic.ml.keras.predictor import KerasPredictor
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.keras.steps import recorded
from spark_elastic.ml.keras.structure import output_names
from spark_elastic.ml.outputs import OutputShape, suits
from spark_elastic.ml.training.columns import reshaped
from spark_elastic.ml.training.dry_run import (
    DryRunResult,
    UserCodeContext,
    check_callback_states,
    check_metric_names,
    check_monitored_columns,
    history_row,
    round_trip_pickle,
    warn_of_averaged_metrics,
    warn_of_local_batch_statistics,
)
from spark_elastic.ml.training.progress import Sums
from spark_elastic.reporting.history import FACTS

log = logging.getLogger("spark_elastic.ml")

ROWS = 4


def run_once(
    training: KerasTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None
) -> DryRunResult:
    """Forward, loss, metrics, backward and an optimizer step of a copy; then what `transform` will do.

    Raises:
        DataError: model, loss or metrics cannot deal with the rows; with the names and shapes of all tensors.
        InvalidSettingsError: the settings do not go together.
    """
    resolve_order(training.dataset, order=training.order, shuffle=training.shuffle, cache_bytes=training.cache_bytes)
    training = round_trip_pickle(training)
    batch = first_rows(training, ROWS)
    with UserCodeContext("the model, its loss and its metrics", batch.rows, batch.tensors):
        ready = prepared(training)
    warn_of_averaged_metrics(
        ready.averaged, "a keras.metrics.Metric (keras.metrics.AUC, ...), whose variables are added up"
    )
    callbacks = adapted(training.callbacks.open() if training.callbacks is not None else [], training, ready.model)
    check_one_best(callbacks)
    if training.sync_batch_norm:
        warn_of_local_batch_statistics(unconverted(ready.model), "call", "keras.layers.BatchNormalization")
    sums = _step(ready, batch)
    _check_followed(training, ready, sums, callbacks)
    check_callback_states(callbacks)
    return _outputs(training, ready, batch, inference_fn)


def _step(ready: Prepared, batch: Batch) -> Sums:
    """Returns: what was measured of the rows."""
    (arrays,) = ready.feeding.arrays(batch, parts=1)
    tensors = tuple(map(tf.constant, arrays))
    with UserCodeContext("the model and its loss", batch.rows, dict(zip(ready.feeding.names, tensors, strict=True))):
        ready.sums.reset()
        with recorded(ready.model.optimizer, tf.constant(1.0, tf.float64)) as record:
            logs = ready.model.train_step(ready.feeding.structure(tensors))
        returned = ready.sums.of_returned("", logs, float(batch.rows)).numpy()
        sums: Sums = np.concatenate([ready.sums.read().numpy(), returned, [float(batch.rows)]])
    try:
        ready.model.optimizer.apply(record.grads, record.variables)
    except Exception as error:
        raise InvalidSettingsError(
            f"{type(ready.model.optimizer).__name__} cannot change the model's weights: {type(error).__name__}: {error}"
        ) from error
    if batch.rows > 1:
        _check_sums(ready, arrays)
    return sums


def _check_sums(ready: Prepared, arrays: Sequence[Any]) -> None:
    """Raises: InvalidSettingsError: what a metric holds of two batches is not the sum of what it holds of each."""

    def held(*batches: slice) -> dict[str, Sums]:
        ready.model.reset_metrics()
        before = _states(ready.model)
        for rows in batches:
            ready.model.test_step(ready.feeding.structure(tuple(tf.constant(each[rows]) for each in arrays)))
        return {name: after - before[name] for name, after in _states(ready.model).items()}

    middle = len(arrays[0]) // 2
    first, second = slice(0, middle), slice(middle, None)
    one, other, both = held(first), held(second), held(first, second)
    for name, value in both.items():
        if not np.allclose(value, one[name] + other[name], rtol=1e-3, atol=1e-6, equal_nan=True):
            raise InvalidSettingsError(
                f"what the metric {name} holds of two batches is not the sum of what it holds of each, as it has to be "
                "to be added up over workers; make sums of it, or take it out and compute it of the model's outputs"
            )


def _states(model: Any) -> dict[str, Sums]:
    return {
        f"{metric.name} ({each.path})": np.asarray(each.numpy(), np.float64)
        for metric in model.metrics
        for each in metric.variables
    }


def _check_followed(training: KerasTraining, ready: Prepared, sums: Sums, callbacks: Sequence[Callback]) -> None:
    """Raises: InvalidSettingsError: something follows a column that the history will not have."""
    logs = ready.sums.logs(sums)
    check_metric_names(name for name in logs if name != "loss")
    if math.isnan(logs.get("loss", 0.0)):
        log.warning("the loss of the first rows is not a number; training begins all the same")
    row = history_row(training, logs)
    check_monitored_columns([*callbacks, *training.plan_callbacks()], row)
    for each in callbacks:
        if isinstance(each, KerasCallback):
            _check_monitor(each.wrapped, ready.model, [name for name in row if name not in FACTS])


def _check_monitor(callback: Any, model: Any, names: Sequence[str]) -> None:
    """Raises: InvalidSettingsError: a callback of Keras follows what it will not be told."""
    kind, monitor = type(callback).__name__, getattr(callback, "monitor", None)
    if isinstance(monitor, str) and monitor not in names and monitor != "learning_rate":
        raise InvalidSettingsError(f"{kind} follows {monitor!r}, and the logs have {', '.join(names)}")
    if hasattr(callback, "_set_monitor_op"):
        callback.set_model(model)
        try:
            callback._set_monitor_op()
        except ValueError as error:
            raise InvalidSettingsError(str(error)) from None


def _outputs(training: KerasTraining, ready: Prepared, batch: Batch, inference_fn: Any) -> DryRunResult:
    """The model called as `transform` calls it."""
    features: dict[str, Any] = {
        field.name: reshaped(batch.tensors[field.name], field.shape, batch.rows)
        for field in model_inputs(training.dataset, training.input_shapes)
    }
    try:
        if inference_fn is not None:
            features = dict(inference_fn(features))
        outputs = KerasPredictor(ready.model)(features)
        for index, output in enumerate(outputs):
            if output.shape[:1] != (batch.rows,):
                raise DataError(f"output {index} has shape {list(output.shape)} for {batch.rows} rows")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if inference_fn is None and training.transformation_fn is not None:
            why += " (training saw the rows through transformation_fn; transform does so through inference_fn)"
        log.warning("transform will not work: the model cannot be called with its features alone: %s", why)
        return DryRunResult((), why_not=why)
    shapes = tuple(OutputShape(output.dtype.str, output.shape[1:]) for output in outputs)
    names = output_names(ready.model)
    of_outputs = losses_by_output(ready.compiled.loss, names)
    first = [loss for name, loss in of_outputs[:1] if names is None or name in (None, names[0])]
    rule = losses.rule(first[0]) if first else None
    return DryRunResult(shapes, rule if rule is not None and suits(rule, shapes[0].shape) else None)
