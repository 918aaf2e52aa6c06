"""Losses and metrics of a Keras model as sums over rows, which are added up over batches, workers and worlds.

Keras takes the mean of a loss over the rows of one worker. Multiplied by the worker's share of the rows, these means
add up to the mean over the batch. `ml.keras.objective` scales other losses so that the same holds for them.

Each step begins with empty metrics, and the values of their variables after it are reduced with the gradients. The sums
of an epoch are plain float64 numbers, which are put into the variables to compute the results.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.keras.compiling import CompileArguments, output_names
from spark_elastic.ml.keras.objective import ScaledLoss, Shares
from spark_elastic.ml.training.engine import MetricAccumulator, columns_of
from spark_elastic.ml.training.spec import Piece, Sums

_AUTOMATIC_NUMBER = re.compile(r"_\d+$")  # the end of a name that Keras has chosen, which differs between processes


def complete_losses(compiled: CompileArguments, model: Any) -> CompileArguments:
    """Replace a dict of losses by a list with an entry for each output, because Keras needs all keys in a dict."""
    names, loss, factors = output_names(model), compiled.loss, compiled.loss_weights
    if names is None or isinstance(getattr(model, "_outputs_struct", None), dict):
        return compiled
    if not isinstance(loss, Mapping) or "class_name" in loss or set(loss) == set(names):
        return compiled
    if isinstance(factors, Mapping):
        factors = [factors.get(name, 1.0) for name in names]
    return replace(compiled, loss=[loss.get(name) for name in names], loss_weights=factors)


def count_by_row(compiled: CompileArguments, shares: Shares, averaged: list[str]) -> CompileArguments:
    """Scale losses by the shares, and weigh metric functions that return one number by rows.

    The names of such functions are added to `averaged` once they are called.
    """

    def scaled(loss: Any) -> Any:
        return None if loss is None else ScaledLoss(loss, shares)

    def by_row(metric: Any) -> Any:
        if not inspect.isfunction(metric):
            return metric

        @functools.wraps(metric)
        def values(y_true: Any, y_pred: Any) -> Any:
            value = keras.ops.convert_to_tensor(metric(y_true, y_pred))
            if len(value.shape):
                return value
            if metric.__name__ not in averaged:
                averaged.append(metric.__name__)
            return keras.ops.broadcast_to(value, (keras.ops.shape(y_pred)[0],))

        return values

    return replace(
        compiled,
        loss=_each(scaled, compiled.loss),
        metrics=_each(by_row, compiled.metrics),
        weighted_metrics=_each(by_row, compiled.weighted_metrics),
    )


def _each(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to each entry of lists and dicts; the configuration of a Keras object is one entry."""
    if isinstance(values, Mapping) and "class_name" not in values:
        return {name: _each(function, one) for name, one in values.items()}
    return [_each(function, one) for one in values] if isinstance(values, (list, tuple)) else function(values)


def weigh_means_by_row(model: Any, shares: Shares) -> None:
    """Weigh running means by rows, not by batches: of the losses, and of what a user's train_step adds for all rows."""
    for metric in model._compile_loss.metrics if model._compile_loss is not None else ():

        def update_state(value: Any, sample_weight: Any = None, plain: Any = metric.update_state) -> Any:
            return plain(value, sample_weight=keras.ops.cast(shares.count, value.dtype))

        object.__setattr__(metric, "update_state", update_state)
    if _is_of_keras(model.train_step) and _is_of_keras(model.test_step):
        return
    for metric in single_metrics(model.metrics):

        def update_mean(values: Any, sample_weight: Any = None, plain: Any = metric.update_state) -> Any:
            values = keras.ops.convert_to_tensor(values)
            if sample_weight is None and not len(values.shape):
                sample_weight = keras.ops.cast(shares.rows, keras.config.floatx())
            return plain(values, sample_weight=sample_weight)

        if type(metric).update_state is keras.metrics.Mean.update_state:
            object.__setattr__(metric, "update_state", update_mean)


class KerasMetricAccumulator(MetricAccumulator):
    """The sums of a compiled model: of its metrics' variables, and of the values that a user's steps return.

    The vector: by how much each variable of the metrics exceeds its initial value; the values that a user's train_step
    returns, times the rows; the rows. `returned` has the names of what a user's train_step ("") and test_step ("val_")
    return, once traced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        found = {id(variable): variable for metric in model.metrics for variable in metric.variables}
        self._variables = list(found.values())
        for metric in model.metrics:
            for variable in metric.variables:
                if getattr(variable, "aggregation", "sum") != "sum":
                    raise InvalidSettingsError(
                        f"the metric {metric.name} keeps {variable.name} with aggregation={variable.aggregation!r}, "
                        "and only sums can be added up over workers; make it a sum, or compute the metric from the "
                        "model's outputs after the training"
                    )
        model.reset_metrics()
        self._first = [np.array(variable.numpy()) for variable in self._variables]
        self._sizes = [first.size for first in self._first]
        self._states = sum(self._sizes)
        self._starts = dict(zip(map(id, self._variables), np.cumsum([0, *self._sizes]).tolist(), strict=False))
        self._means = [each for each in single_metrics(model.metrics) if isinstance(each, keras.metrics.Mean)]
        self.loss_positions = self._loss_means()
        self._steps = {"": model.train_step, "val_": model.test_step}
        self.returned: dict[str, list[str]] = {"": [], "val_": []}

    @property
    def names(self) -> list[str]:
        metrics = [_AUTOMATIC_NUMBER.sub("", str(metric.name)) for metric in self._model.metrics]
        return [*metrics, *self.returned[""], f"{self._states + len(self.returned['']) + 1} numbers"]

    def reset(self) -> None:
        self.restore(self._first)

    def snapshot(self) -> list[Any]:
        return [variable.value.read_value() for variable in self._variables]

    def restore(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def read(self) -> Any:
        """Return the sums since `reset`: float64, shape [n]."""
        parts = []
        for variable, first in zip(self._variables, self._first, strict=True):
            value = tf.cast(tf.reshape(variable.value, [-1]), tf.float64)
            parts.append(value - first.reshape(-1).astype(np.float64) if first.any() else value)
        return tf.concat(parts, 0) if parts else tf.zeros([0], tf.float64)

    def of_returned(self, prefix: str, logs: Any, rows: Any) -> Any:
        """Return the scalars that a user's step has returned, times its rows: float64, shape [number of names]."""
        if _is_of_keras(self._steps[prefix]) or not isinstance(logs, Mapping):
            return tf.zeros([0], tf.float64)
        scalars = {
            str(name): value
            for name, value in logs.items()
            if isinstance(value, (int, float)) or tuple(getattr(value, "shape", (1,))) == ()
        }
        self.returned[prefix] = list(scalars)
        if prefix == "" and "loss" in scalars:
            self.loss_positions = [*self._loss_means(), self._states + list(scalars).index("loss")]
        if not scalars:
            return tf.zeros([0], tf.float64)
        return tf.stack([tf.cast(tf.reshape(value, []), tf.float64) for value in scalars.values()]) * rows

    def logs(self, sums: Sums, pieces: Sequence[Piece] = (), prefix: str = "") -> dict[str, float]:
        at, idle = 0, set()
        for variable, first, size in zip(self._variables, self._first, self._sizes, strict=True):
            added = sums[at : at + size]
            if not added.any():
                idle.add(id(variable))
            value = first.astype(np.float64) + added.reshape(first.shape)
            variable.assign((value if first.dtype.kind == "f" else value.round()).astype(first.dtype))
            at += size
        returned = self._returned_means(sums, prefix)
        out: dict[str, float] = {}
        for metric in self._model.metrics:
            touched = any(id(variable) not in idle for variable in metric.variables)
            result = metric.result()
            columns = result if isinstance(result, Mapping) else {metric.name: result}
            for name, value in columns.items():
                if touched or (name not in returned and _is_of_keras(self._steps[prefix])):
                    out.update(columns_of(str(name), np.asarray(value, np.float64)))
        out = {**{name: value for name, value in returned.items() if name not in out}, **out}
        return {f"{prefix}{name}": value for name, value in _loss_first(out).items()}

    def live_logs(self, sums: Sums) -> dict[str, float]:
        out: dict[str, float] = {}
        for metric in self._means:
            total, count = (float(sums[self._starts[id(variable)]]) for variable in (metric.total, metric.count))
            if count:
                out[str(metric.name)] = total / count
        if self.rows(sums):
            out.update(self._returned_means(sums, ""))
        return _loss_first(out)

    def _loss_means(self) -> list[int]:
        return [self._starts[id(each.total)] for each in self._means if each.name == "loss"]

    def _returned_means(self, sums: Sums, prefix: str) -> dict[str, float]:
        names = self.returned[prefix]
        means = (sums[self._states : self._states + len(names)] / max(self.rows(sums), 1)).tolist()
        return dict(zip(names, means, strict=True))


def _loss_first(logs: dict[str, float]) -> dict[str, float]:
    loss = {"loss": logs.pop("loss")} if "loss" in logs else {}
    return {**loss, **logs}


def _is_of_keras(step: Any) -> bool:
    return str(step.__func__.__module__).partition(".")[0] == "keras"


def single_metrics(metrics: Sequence[Any]) -> list[Any]:
    """Return the metrics one by one; Keras puts those of `compile` into a container that is a metric itself."""
    return [each for metric in metrics for each in (getattr(metric, "metrics", None) or [metric])]
