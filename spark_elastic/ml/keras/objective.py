"""Losses whose mean over the rows of a batch is the same however the batch is divided.

Keras takes the mean over the rows that a worker has, and multiplied by the worker's share of the rows these means add
up to that of the batch. A loss that is a sum, or is divided by the sum of the sample weights, is scaled for that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras

from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.structure import output_names

SUM, BY_WEIGHT = "sum", "mean_with_sample_weight"


@dataclass
class Shares:
    """Of the global batch, in the rows that go through the model now. Tensors, while a graph is traced.

    count: the number of these rows. rows: that, divided by the number of those of the batch. weight: the sum of their
    sample weights, divided by that of the batch.
    """

    rows: Any = 1.0
    weight: Any = 1.0
    count: Any = 1.0

    @contextmanager
    def of(self, count: Any, rows: Any, weight: Any) -> Iterator[None]:
        """While this lasts, these. Tensors of a graph are no use outside of it."""
        before = (self.count, self.rows, self.weight)
        self.count, self.rows, self.weight = count, rows, weight
        try:
            yield
        finally:
            self.count, self.rows, self.weight = before


class Scaled(keras.losses.Loss):
    """Another loss, so that the sum over workers of it times `shares.rows` is that of the whole batch."""

    def __init__(self, loss: Any, shares: Shares) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self._loss = loss
        self._shares = shares

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
        whole = 1.0 if self.reduction == SUM else self._shares.weight
        return value * keras.ops.cast(whole / self._shares.rows, value.dtype)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._loss.call(y_true, y_pred)


def for_outputs(compiled: CompileArguments, model: Any) -> CompileArguments:
    """With a loss, or none, for each output, where Keras would not have some left out of a dict."""
    names, loss, factors = output_names(model), compiled.loss, compiled.loss_weights
    if names is None or isinstance(getattr(model, "_outputs_struct", None), dict):
        return compiled
    if not isinstance(loss, Mapping) or "class_name" in loss or set(loss) == set(names):
        return compiled
    if isinstance(factors, Mapping):
        factors = [factors.get(name, 1.0) for name in names]
    return replace(compiled, loss=[loss.get(name) for name in names], loss_weights=factors)


def row_exact(compiled: CompileArguments, shares: Shares, weighted: bool) -> CompileArguments:
    """With losses that need it scaled. weighted: whether there are sample weights."""
    needed = (SUM, BY_WEIGHT) if weighted else (SUM,)

    def each(loss: Any) -> Any:
        if isinstance(loss, Mapping):
            if "class_name" in loss:
                return each(keras.losses.get(dict(loss)))
            return {name: each(one) for name, one in loss.items()}
        if isinstance(loss, (list, tuple)):
            return [each(one) for one in loss]
        return Scaled(loss, shares) if isinstance(loss, keras.losses.Loss) and loss.reduction in needed else loss

    return replace(compiled, loss=each(compiled.loss))


def metrics_by_row(compiled: CompileArguments, averaged: list[str]) -> CompileArguments:
    """With metrics that are functions and return one number for all rows: each of these then counts by its rows.

    averaged: their names are added, once they were called.
    """

    def each(metric: Any) -> Any:
        if isinstance(metric, Mapping):
            return {name: each(one) for name, one in metric.items()}
        if isinstance(metric, (list, tuple)):
            return [each(one) for one in metric]
        return _by_row(metric, averaged) if inspect.isfunction(metric) else metric

    return replace(compiled, metrics=each(compiled.metrics), weighted_metrics=each(compiled.weighted_metrics))


def _by_row(function: Any, averaged: list[str]) -> Any:
    @functools.wraps(function)
    def values(y_true: Any, y_pred: Any) -> Any:
        value = keras.ops.convert_to_tensor(function(y_true, y_pred))
        if len(value.shape):
            return value
        if function.__name__ not in averaged:
            averaged.append(function.__name__)
        return keras.ops.broadcast_to(value, (keras.ops.shape(y_pred)[0],))

    return values


def weigh_by_rows(model: Any, shares: Shares) -> None:
    """Have what a compiled model keeps of the loss of each output count by rows, where Keras counts batches if it does
    not know their size while it traces."""
    for metric in model._compile_loss.metrics if model._compile_loss is not None else ():

        def update_state(value: Any, sample_weight: Any = None, plain: Any = metric.update_state) -> Any:
            return plain(value, sample_weight=keras.ops.cast(shares.count, value.dtype))

        object.__setattr__(metric, "update_state", update_state)


def divides_by_weights(compiled: CompileArguments) -> bool:
    """Whether a loss needs the sum of the sample weights of the whole batch."""
    return any(
        isinstance(each, keras.losses.Loss) and each.reduction == BY_WEIGHT
        for each in keras.tree.flatten(compiled.loss)
    )
