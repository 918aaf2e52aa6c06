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
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.keras.sync_batch_normalization import unconverted
from spark_elastic.ml.callbacks import Callback, check_one_best, validation_hint
from spark_elastic.ml.keras.callbacks import KerasCallback, adapt_callbacks
from spark_elastic.ml.keras.compiling import check_columns, losses_by_output, output_names, rule
from spark_elastic.ml.keras.engine import PreparedModel, prepare
from spark_elastic.ml.keras.metrics import single_metrics
from spark_elastic.ml.keras.model import KerasPredictor
from spark_elastic.ml.keras.serialization import fill, weights_to_bytes
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.keras.steps import GradientRecord, buffers_of, part_arguments, seeds_of
from spark_elastic.ml.preparation import LABEL, WEIGHT, split_evenly
from spark_elastic.ml.training import dry_run as common
from spark_elastic.ml.training.dry_run import DryRunResult, user_code
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.ml.training.spec import Sums
from spark_elastic.reporting.history import FACTS

log = logging.getLogger("spark_elastic.ml")

_ROWS_OF_MEANS = 16  # of which the loss is compared with that of their parts; more of a user's own
_DRAWS = 4  # the number of times that a random loss is computed


def dry_run(
    training: KerasTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None
) -> DryRunResult:
    """Do forward, loss, metrics, backward and an optimizer step on a copy; then call the model as `transform` does."""
    common.check_order(training)
    training = common.round_trip_pickle(training)
    batch = first_rows(training, common.ROWS)
    with user_code("the model, its loss and its metrics", batch.rows, batch.tensors):
        ready = prepare(training)
    names = output_names(ready.model)
    of_outputs = losses_by_output(ready.compiled.loss, names)
    labels = [field.columns for field in training.dataset.layout.fields if field.name.startswith("label_")]
    alike = training.transformation_fn is None and len(labels) == len(names or ())
    structure = getattr(ready.model, "_outputs_struct", None) if alike else None
    check_columns("label_cols", "outputs", [name for name, _ in of_outputs], labels, structure)
    common.warn_of_averaged_metrics(
        ready.averaged, "a keras.metrics.Metric (keras.metrics.AUC, ...), whose variables are added up"
    )
    given = training.callbacks.load() if training.callbacks is not None else []
    callbacks = adapt_callbacks(given, training, ready.model)
    check_one_best(callbacks)
    if training.sync_batch_norm:
        common.warn_of_local_batch_statistics(
            unconverted(ready.model),
            "the class overrides call",
            "Use keras.layers.BatchNormalization, or set sync_batch_norm=False",
        )
    _check_means(training, ready)
    sums = _step(training, ready, batch)
    _check_columns(training, ready, sums, callbacks)
    common.check_callback_states(callbacks)
    first = [loss for name, loss in of_outputs[:1] if names is None or name in (None, names[0])]
    with common.returned_model(f"model {ready.model.name}"):
        ready.model.optimizer.finalize_variable_values(ready.model.trainable_variables)
        predictor = KerasPredictor(fill(training.model.load(), weights_to_bytes(ready.model)))
    return common.try_transform(training, batch, predictor, inference_fn, rule(first[0]) if first else None)


def _check_means(training: KerasTraining, ready: PreparedModel) -> None:
    """Raise InvalidSettingsError if the loss of a batch (the mean of some draws) depends on its division into parts."""
    batch = first_rows(training, _ROWS_OF_MEANS)
    shares, graphs, rows = ready.shares, ready.graphs, batch.rows
    if rows < 2:
        return
    if shares.scalars and WEIGHT in ready.feeder.names and not training.loss_is_per_worker:
        name = _names_of_terms(ready)[min(shares.scalars)]
        raise InvalidSettingsError(
            f"the loss {name} returns one number for all rows, which sample weights cannot be applied to; return a "
            "value for each row, or numerators and denominators by row"
        )
    if training.loss_is_per_worker and not shares.counted:
        return
    names: list[str] = []
    steady = bool(buffers_of(ready.model) or seeds_of(ready.model))

    def losses(tensors: Any, of_part: Any) -> Any:
        found = _losses(ready, tensors, of_part, training=not steady)
        names[:] = found
        return tf.stack([tf.cast(tf.reduce_sum(value), tf.float64) for value in found.values()] or [0.0])

    signature = [tuple(ready.feeder.specs), tf.TensorSpec([2 + shares.terms], tf.float64)]
    traced = tf.function(losses, input_signature=signature, autograph=False)

    def parts_of(count: int) -> list[tuple[Any, ...]]:
        return [tuple(tf.constant(each[a:b]) for each in arrays) for a, b in split_evenly(rows, count)]

    def mean(parts: Sequence[Any], totals: Sequence[float]) -> Any:
        """Return the mean of the losses of parts of the rows, weighted by the parts' rows."""
        return sum(traced(*part_arguments(part, rows, totals)).numpy() * len(part[0]) / rows for part in parts)

    (arrays,) = ready.feeder.arrays(batch, parts=1)
    with user_code("the loss", rows, dict(zip(ready.feeder.names, arrays, strict=True))):
        mean(parts_of(1), [1.0] * shares.terms)
        compiled = [each.loss._loss for each in getattr(ready.model._compile_loss, "_flat_losses", None) or []]
        functions = [getattr(each, "fn", None) or type(each) for each in compiled if each is not None]
        own = any(not str(getattr(each, "__module__", "")).startswith("keras.") for each in functions)
        if own or len(names) > shares.terms:
            a_row = sum(each.nbytes for each in arrays) // rows + 4 * ready.model.count_params()
            batch = first_rows(training, common.rows_of_losses(a_row, rows))
            (arrays,), rows = ready.feeder.arrays(batch, parts=1), batch.rows
        # parts of one row differ most, and one whose label is ignored is seen
        whole, parts = parts_of(1), parts_of(rows)
        of_whole, of_parts = (graphs.totals(each, lambda own: own) for each in (whole, parts))
        _check_denominators(ready, rows, of_whole, of_parts, training.loss_is_per_worker)
        if training.loss_is_per_worker:
            return
        wholes = np.stack([mean(whole, of_whole) for _ in range(_DRAWS)])
        divided = np.stack([mean(parts, of_parts) for _ in range(_DRAWS if np.ptp(wholes, 0).any() else 1)])
    _compare(ready, names, rows, wholes, divided, _shapes(ready, arrays))


def _check_denominators(
    ready: PreparedModel, rows: int, whole: Sequence[float], parts: Sequence[float], per_worker: bool
) -> None:
    """Raise InvalidSettingsError if the denominators of single rows do not add up to those of all of them."""
    for number in ready.shares.counted:
        expected, found = whole[number], parts[number]
        if found > expected * (1 + 1e-3) or (found < expected * (1 - 1e-3) and not per_worker):
            raise InvalidSettingsError(
                f"the loss {_names_of_terms(ready)[number]} returned two values, for a numerator and a denominator, "
                f"and the second is no denominator: it is {expected:.6g} for the first {rows} rows together, and "
                f"{found:.6g} in all for the single rows. Return a value for each row, or (numerator, denominator), "
                "such as the sum over the labels that count and their number"
            )


def _compare(ready: PreparedModel, names: Sequence[str], rows: int, wholes: Any, divided: Any, shapes: str) -> None:
    scale = np.maximum(np.maximum(np.abs(wholes).max(0), np.abs(divided).max(0)), 1e-3)  # sums of what cancels out
    # outputs that differ little give about the same for all pairs as for the right ones
    rounding = 1e-2 if "16" in str(ready.model.compute_dtype) else 2e-5 if shapes else 1e-3
    apart = np.abs(wholes.mean(0) - divided.mean(0))
    within = apart <= rounding * scale + np.ptp(wholes, 0) + np.ptp(divided, 0)
    wrong = ~within & np.isfinite(wholes).all(0)  # a part may be NaN
    for at, name in enumerate(names):
        if wrong[at]:
            raise InvalidSettingsError(
                f"the loss {name} is not a mean over rows: it is {wholes[0][at]:.6g} for the first {rows} rows, and "
                f"{divided[0][at]:.6g} if they are divided into {rows} parts, as workers and accumulation_steps divide "
                f"a batch.{shapes} Return a value for each row "
                "(for a sum in a keras.losses.Loss with reduction='sum'), or (numerator, denominator); or set "
                "loss_is_per_worker=True, with which the result depends on the number of workers"
            )


def _losses(ready: PreparedModel, tensors: Any, of_part: Any, training: bool) -> dict[str, Any]:
    """Return the values of the losses of some rows by name: those of `compile`, and those that layers add."""
    model, shares = ready.model, ready.shares
    x, y, weights = (*ready.feeder.structure(tensors), None)[:3]
    with shares.for_part(of_part):
        outputs = model(x, training=training)
        found = {
            f"added by {layer.name}": keras.ops.sum(value)
            for layer in model._flatten_layers()
            for value in layer._get_own_losses()
        }
        with keras.StatelessScope():  # a loss with a state counts none of these calls
            if shares.terms:
                model._compile_loss(y, outputs, weights)
                found |= {_names_of_terms(ready)[number]: value for number, value in shares.values.items()}
            if not type(model).compute_loss.__module__.startswith("keras."):
                found["of compute_loss"] = model._compute_loss(x, y, outputs, weights, training=training)
    return found


def _names_of_terms(ready: PreparedModel) -> list[str]:
    flat = ready.model._compile_loss._flat_losses
    return [each.name if len(flat) == 1 else f"{each.loss.name} of {each.name}" for each in flat]


def _shapes(ready: PreparedModel, arrays: Sequence[Any]) -> str:
    """Return a sentence for labels and outputs that may be compared in all pairs; "" if there are none."""
    for at, (name, label) in enumerate((n, a) for n, a in zip(ready.feeder.names, arrays, strict=True) if LABEL in n):
        outputs = getattr(ready.model, "outputs", None) or []
        shape = list(outputs[at].shape)[1:] if at < len(outputs) else list(label.shape[1:])
        if shape != list(label.shape[1:]) and label.size == len(label) * math.prod(n or 0 for n in shape):
            return (
                f" {name} is {['rows', *label.shape[1:]]} and the output {['rows', *shape]}: if the loss compares "
                "them in all pairs, give them one shape there, or by label_shapes."
            )
    return ""


def _step(training: KerasTraining, ready: PreparedModel, batch: Batch) -> Sums:
    (arrays,) = ready.feeder.arrays(batch, parts=1)
    tensors = tuple(map(tf.constant, arrays))
    optimizer, metrics = ready.model.optimizer, ready.metrics
    with user_code("the model and its loss", batch.rows, dict(zip(ready.feeder.names, tensors, strict=True))):
        metrics.reset()
        with GradientRecord(optimizer, tf.constant(1.0, tf.float64)) as record:
            logs = ready.model.train_step(ready.feeder.structure(tensors))
        returned = metrics.of_returned("", logs, float(batch.rows)).numpy()
        sums: Sums = np.concatenate([metrics.read().numpy(), returned, [float(batch.rows)]])
    with common.optimizer_errors(optimizer, "weights"):
        optimizer.apply(record.grads, record.variables)
    if batch.rows > 1:
        own_test_step = not str(type(ready.model).test_step.__module__).startswith("keras.")
        if ready.model._compile_loss is not None or ready.model.losses or own_test_step:
            _check_sums(ready, arrays)
        _check_pairs(ready, tensors)
        if not training.loss_is_per_worker:
            _warn_of_buffers_by_rows(
                ready.model, [ready.feeder.structure(tuple(each[at::2] for each in tensors))[0] for at in (0, 1)]
            )
    return sums


def _warn_of_buffers_by_rows(model: Any, inputs: Sequence[Any]) -> None:
    """Warn of variables, but those of batch normalisation, that parts of a batch would leave with different values."""
    norms = [each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization)]
    of_norms = {id(each) for norm in norms for each in norm.weights}
    buffers = [each for each in buffers_of(model) if id(each) not in of_norms]
    kept = [(each, each.numpy()) for each in (*buffers_of(model), *seeds_of(model))] if buffers else []
    found = []
    for x in inputs if buffers else ():
        model(x, training=True)
        found.append([each.numpy() for each in buffers])
        for variable, value in kept:
            variable.assign(value)
    common.warn_of_local_batch_statistics(
        [each.path for each, *values in zip(buffers, *found, strict=True) if not np.array_equal(*values)],
        "the model changes them by the rows that it is called with",
        "Set loss_is_per_worker=True",
    )


def _check_sums(ready: PreparedModel, arrays: Sequence[Any]) -> None:
    """Raise InvalidSettingsError if a metric's variables after two batches are not the sum of those after each one."""

    def states() -> dict[str, Sums]:
        return {
            f"{metric.name} ({each.path})": np.asarray(each.numpy(), np.float64)
            for metric in single_metrics(ready.model.metrics)
            for each in metric.variables
            if not type(metric).__module__.startswith("keras.")  # those of Keras are sums, perhaps of random outputs
        }

    def added(*batches: slice) -> dict[str, Sums]:
        ready.model.reset_metrics()
        before = states()
        for rows in batches:
            ready.model.test_step(ready.feeder.structure(tuple(tf.constant(each[rows]) for each in arrays)))
        return {name: after - before[name] for name, after in states().items()}

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


def _check_pairs(ready: PreparedModel, tensors: tuple[Any, ...]) -> None:
    """Raise DataError if a metric compares each output [rows, 1] with the labels [rows] of all rows.

    Then it depends on the labels' shape, but not on their order. The labels are invented: those of the first rows may
    be equal.
    """
    compiled = ready.model._compile_metrics
    if compiled is None or len(tensors[0]) % 2:
        return
    x, y = ready.feeder.structure(tensors)[:2]
    outputs, labels = keras.tree.flatten(ready.model(x, training=False)), keras.tree.flatten(y)
    if len(labels) != len(outputs):
        return
    of_outputs = zip(compiled._flat_metrics, compiled._flat_weighted_metrics, strict=True)
    for label, output, lists in zip(labels, outputs, of_outputs, strict=False):
        if label.shape == output.shape or tf.size(label) != tf.size(output):
            continue
        of_rows = tf.reshape(tf.range(len(label)) % 2, [-1] + [1] * (len(label.shape) - 1))
        invented = tf.broadcast_to(tf.cast(of_rows, label.dtype), tf.shape(label))
        for metric in (each for group in lists if group is not None for each in group.metrics):
            found = []
            try:
                for given in (invented, tf.reverse(invented, [0]), tf.reshape(invented, tf.shape(output))):
                    metric.reset_state()
                    metric.update_state(given, output)
                    found.append(np.asarray(metric.result(), np.float64))
            except Exception as error:
                log.info("the metric %s cannot be tried on other labels: %s", metric.name, error)
                continue
            if np.allclose(found[0], found[1]) and not np.allclose(found[0], found[2], rtol=1e-3):
                raise DataError(
                    f"the metric {metric.name} compares labels {list(label.shape)} and outputs {list(output.shape)} in "
                    "all pairs: it does not depend on the order of the labels; give them one shape, in the metric or "
                    "by label_shapes"
                )
    ready.model.reset_metrics()


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
