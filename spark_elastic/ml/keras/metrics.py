"""Losses and metrics of a Keras model as sums, which are added up over batches, workers and worlds.

A Keras metric is a set of variables to which batches are added. Here each step begins with empty metrics, and the
values of their variables after it travel with the gradients. The sums of an epoch are plain float64 numbers, which are
put into the variables to compute the results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.training.engine import MetricAccumulator, columns_of
from spark_elastic.ml.training.spec import Piece, Sums

_AUTOMATIC_NUMBER = re.compile(r"_\d+$")
"""The end of a name that Keras has chosen, which differs between processes."""


class KerasMetricAccumulator(MetricAccumulator):
    """The sums of a compiled model whose metrics have their variables, and of the values that its steps return.

    The vector: the values of the metrics' variables beyond their initial values; the values that a user's train_step
    returns, times the rows; the rows.

    Attributes:
        returned: the names of the values that a user's train_step ("") and test_step ("val_") return, once traced.

    Raises:
        InvalidSettingsError: a metric has variables that cannot be added up.
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
        self._means = [each for each in _single(model.metrics) if isinstance(each, keras.metrics.Mean)]
        self.loss_positions = self._loss_means()
        self._steps = {"": model.train_step, "val_": model.test_step}
        self.returned: dict[str, list[str]] = {"": [], "val_": []}

    @property
    def names(self) -> list[str]:
        metrics = [_AUTOMATIC_NUMBER.sub("", str(metric.name)) for metric in self._model.metrics]
        return [*metrics, *self.returned[""], f"{self.width()} numbers"]

    def width(self, prefix: str = "") -> int:
        return self._states + len(self.returned[prefix]) + 1

    # --- in a graph -------------------------------------------------------------------------------

    def reset(self) -> None:
        for variable, first in zip(self._variables, self._first, strict=True):
            variable.assign(first)

    def snapshot(self) -> list[Any]:
        """Return the present values of the variables, for `restore`."""
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
        scalars = {str(name): value for name, value in logs.items() if _is_scalar(value)}
        self.returned[prefix] = list(scalars)
        if prefix == "" and "loss" in scalars:
            self.loss_positions = [*self._loss_means(), self._states + list(scalars).index("loss")]
        if not scalars:
            return tf.zeros([0], tf.float64)
        return tf.stack([tf.cast(tf.reshape(value, []), tf.float64) for value in scalars.values()]) * rows

    # --- outside of graphs ------------------------------------------------------------------------

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
    """Return whether a train_step or test_step is the one that every model has."""
    return str(step.__func__.__module__).partition(".")[0] == "keras"


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(value, (int, float)) or (shape is not None and tuple(shape) == ())


def _single(metrics: Sequence[Any]) -> list[Any]:
    """Return the metrics without the containers that Keras puts the compiled ones into."""
    return [each for metric in metrics for each in (getattr(metric, "metrics", None) or [metric])]
