"""Losses and metrics whose means over the rows of a batch do not depend on how the batch is divided over workers.

Keras takes the mean over the rows of one worker. Multiplied by the worker's share of the rows, these means add up to
that of the batch. Losses that are sums, or are divided by the sum of the sample weights, are scaled to do the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras

from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.structure import output_names

SUM, BY_WEIGHT = "sum", "mean_with_sample_weight"


@dataclass
class Shares:
    """The shares of the global batch that are in the rows of the present pass; tensors while a graph is traced.

    Attributes:
        rows: the number of these rows, divided by the rows of the batch.
        weight: the sum of their sample weights, divided by that of the batch.
        count: the number of these rows.
    """

    rows: Any = 1.0
    weight: Any = 1.0
    count: Any = 1.0

    @contextmanager
    def of(self, count: Any, rows: Any, weight: Any) -> Iterator[None]:
        """Set the shares for a `with` block, because tensors of a graph are of no use outside of it."""
        before = (self.count, self.rows, self.weight)
        self.count, self.rows, self.weight = count, rows, weight
        try:
            yield
        finally:
            self.count, self.rows, self.weight = before


class ScaledLoss(keras.losses.Loss):
    """A loss, scaled so that its values times `shares.rows`, added up over workers, are the loss of the batch."""

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


def scale_losses(compiled: CompileArguments, shares: Shares, weighted: bool) -> CompileArguments:
    """Scale the losses that are not plain means over rows; `weighted` says that there are sample weights."""
    needed = (SUM, BY_WEIGHT) if weighted else (SUM,)

    def scaled(loss: Any) -> Any:
        if isinstance(loss, Mapping) and "class_name" in loss:
            loss = keras.losses.get(dict(loss))
        return ScaledLoss(loss, shares) if isinstance(loss, keras.losses.Loss) and loss.reduction in needed else loss

    return replace(compiled, loss=_each(scaled, compiled.loss))


def count_metrics_by_row(compiled: CompileArguments, averaged: list[str]) -> CompileArguments:
    """Weigh the values of metrics that are functions and return one number for all rows by these rows.

    Args:
        compiled: the arguments of `compile`.
        averaged: a list to which the names of these metrics are added once they are called.
    """

    def by_row(metric: Any) -> Any:
        return _by_row(metric, averaged) if inspect.isfunction(metric) else metric

    return replace(
        compiled,
        metrics=_each(by_row, compiled.metrics),
        weighted_metrics=_each(by_row, compiled.weighted_metrics),
    )


def _each(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to each entry of lists and dicts; the configuration of a Keras object is one entry."""
    if isinstance(values, Mapping) and "class_name" not in values:
        return {name: _each(function, one) for name, one in values.items()}
    if isinstance(values, (list, tuple)):
        return [_each(function, one) for one in values]
    return function(values)


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


def count_losses_by_row(model: Any, shares: Shares) -> None:
    """Make the running means of the losses count rows.

    Keras counts batches, because it does not know the number of rows while it traces.
    """
    for metric in model._compile_loss.metrics if model._compile_loss is not None else ():

        def update_state(value: Any, sample_weight: Any = None, plain: Any = metric.update_state) -> Any:
            return plain(value, sample_weight=keras.ops.cast(shares.count, value.dtype))

        object.__setattr__(metric, "update_state", update_state)


def divides_by_weights(compiled: CompileArguments) -> bool:
    """Return whether a loss needs the sum of the sample weights of the whole batch."""
    return any(
        isinstance(each, keras.losses.Loss) and each.reduction == BY_WEIGHT
        for each in keras.tree.flatten(compiled.loss)
    )
