"""Do one step of a copy of the training on its first rows, on the driver, so that errors come before workers start."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.data.reader import Batch
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.keras.sync_batch_normalization import unconverted
from spark_elastic.ml.callbacks import Callback, check_one_best, validation_hint
from spark_elastic.ml.keras.callbacks import KerasCallback, adapt_callbacks
from spark_elastic.ml.keras.compiling import check_order, loss_of, losses_by_output, name_of, output_names, rule
from spark_elastic.ml.keras.engine import PreparedModel, prepare
from spark_elastic.ml.keras.metrics import SUM
from spark_elastic.ml.keras.model import KerasPredictor
from spark_elastic.ml.keras.steps import GradientRecord
from spark_elastic.ml.keras.training import KerasTraining
from spark_elastic.ml.training import dry_run as common
from spark_elastic.ml.training.dry_run import DryRunResult, UserCodeContext
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.ml.training.spec import Sums
from spark_elastic.reporting.history import FACTS

log = logging.getLogger("spark_elastic.ml")


def dry_run(
    training: KerasTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None
) -> DryRunResult:
    """Do forward, loss, metrics, backward and an optimizer step on a copy; then call the model as `transform` does.

    Raises DataError, InvalidSettingsError or NotPicklableError as the functions of `ml.training.dry_run` do.
    """
    common.check_order(training)
    training = common.round_trip_pickle(training)
    batch = first_rows(training, common.ROWS)
    with UserCodeContext("the model, its loss and its metrics", batch.rows, batch.tensors):
        ready = prepare(training)
    names = output_names(ready.model)
    of_outputs = losses_by_output(ready.compiled.loss, names)
    labels = [field.columns for field in training.dataset.layout.fields if field.name.startswith("label_")]
    check_order("label_cols", "outputs", [name for name, _ in of_outputs], labels)
    common.warn_of_averaged_metrics(
        ready.averaged, "a keras.metrics.Metric (keras.metrics.AUC, ...), whose variables are added up"
    )
    given = training.callbacks.load() if training.callbacks is not None else []
    callbacks = adapt_callbacks(given, training, ready.model)
    check_one_best(callbacks)
    if training.sync_batch_norm and training.virtual_workers is None:
        common.warn_of_local_batch_statistics(unconverted(ready.model), "call", "keras.layers.BatchNormalization")
    if training.virtual_workers is None:
        _warn_of_masked_means(ready, batch, [loss for _, loss in of_outputs])
    sums = _step(ready, batch)
    _check_columns(training, ready, sums, callbacks)
    common.check_callback_states(callbacks)
    first = [loss for name, loss in of_outputs[:1] if names is None or name in (None, names[0])]
    return common.try_transform(
        training, batch, KerasPredictor(ready.model), inference_fn, rule(first[0]) if first else None
    )


def _warn_of_masked_means(ready: PreparedModel, batch: Batch, losses: Sequence[Any]) -> None:
    """Warn of losses that are means over a mask: shares of a batch are weighted by rows, not by unmasked elements."""
    (arrays,) = ready.feeder.arrays(batch, parts=1)
    inputs = ready.feeder.structure(tuple(map(tf.constant, arrays)))[0]
    with UserCodeContext("the model", batch.rows, batch.tensors):
        outputs = keras.tree.flatten(ready.model(inputs, training=False))
    if len(outputs) != len(losses):  # some outputs have no loss
        outputs = [next((each for each in outputs if _has_mask(each)), None)] * len(losses)
    masked = []
    for loss, output in zip(losses, outputs, strict=True):
        made = loss_of(loss)
        arguments = getattr(made, "_fn_kwargs", None) or {}
        if getattr(made, "reduction", None) == SUM:
            continue
        if _has_mask(output) or arguments.get("ignore_class") is not None:
            masked.append(name_of(loss))
    if masked:
        log.warning(
            "the loss %s is the mean over the elements that a mask leaves of a worker's rows, and workers are weighted "
            "by their rows; so the result depends on the number of workers. Give the loss reduction='sum', and a scale "
            "by loss_weights; or set consistency='exact', where it depends on virtual_workers alone",
            ", ".join(masked),
        )


def _has_mask(output: Any) -> bool:
    """Return whether Keras passes a mask with an output, as of `Embedding(mask_zero=True)`."""
    return getattr(output, "_keras_mask", None) is not None


def _step(ready: PreparedModel, batch: Batch) -> Sums:
    """Do a step and return the sums of its losses and metrics."""
    (arrays,) = ready.feeder.arrays(batch, parts=1)
    tensors = tuple(map(tf.constant, arrays))
    optimizer, metrics = ready.model.optimizer, ready.metrics
    with UserCodeContext("the model and its loss", batch.rows, dict(zip(ready.feeder.names, tensors, strict=True))):
        metrics.reset()
        with GradientRecord(optimizer, tf.constant(1.0, tf.float64)) as record:
            logs = ready.model.train_step(ready.feeder.structure(tensors))
        returned = metrics.of_returned("", logs, float(batch.rows)).numpy()
        sums: Sums = np.concatenate([metrics.read().numpy(), returned, [float(batch.rows)]])
    with common.optimizer_errors(optimizer, "weights"):
        optimizer.apply(record.grads, record.variables)
    if batch.rows > 1:
        _check_sums(ready, arrays)
    return sums


def _check_sums(ready: PreparedModel, arrays: Sequence[Any]) -> None:
    """Raise InvalidSettingsError if a metric's variables after two batches are not the sum of those after each one."""

    def added(*batches: slice) -> dict[str, Sums]:
        ready.model.reset_metrics()
        before = _states(ready.model)
        for rows in batches:
            ready.model.test_step(ready.feeder.structure(tuple(tf.constant(each[rows]) for each in arrays)))
        return {name: after - before[name] for name, after in _states(ready.model).items()}

    middle = len(arrays[0]) // 2
    first, second = slice(0, middle), slice(middle, None)
    one, other, both = added(first), added(second), added(first, second)
    for name, value in both.items():
        if not np.allclose(value, one[name] + other[name], rtol=1e-3, atol=1e-6, equal_nan=True):
            raise InvalidSettingsError(
                f"the variables of the metric {name} after two batches are not the sum of those after each, so they "
                "cannot be added up over workers; write the metric with sums, or compute it from the model's outputs "
                "after the training"
            )


def _states(model: Any) -> dict[str, Sums]:
    return {
        f"{metric.name} ({each.path})": np.asarray(each.numpy(), np.float64)
        for metric in model.metrics
        for each in metric.variables
    }


def _check_columns(training: KerasTraining, ready: PreparedModel, sums: Sums, callbacks: Sequence[Callback]) -> None:
    """Raise InvalidSettingsError if columns of the history clash, or a callback monitors one that is missing."""
    logs = ready.metrics.logs(sums)
    common.check_metric_names(name for name in logs if name != "loss")
    if math.isnan(logs.get("loss", 0.0)):
        log.warning("the loss of the first rows is NaN; training starts all the same")
    row = common.check_monitors(training, callbacks, logs)
    for each in callbacks:
        if isinstance(each, KerasCallback):
            _check_monitor(each.wrapped, ready.model, [name for name in row if name not in FACTS])


def _check_monitor(callback: Any, model: Any, names: Sequence[str]) -> None:
    """Raise InvalidSettingsError if a callback of Keras monitors a value that is not in the logs."""
    kind, monitor = type(callback).__name__, getattr(callback, "monitor", None)
    if isinstance(monitor, str) and monitor not in names and monitor != "learning_rate":
        have = f"{', '.join(names)}{validation_hint(monitor, names)}"
        raise InvalidSettingsError(f"{kind} monitors {monitor!r}, and the logs have {have}")
    if hasattr(callback, "_set_monitor_op"):
        callback.set_model(model)
        try:
            callback._set_monitor_op()
        except ValueError as error:
            raise InvalidSettingsError(str(error)) from None
