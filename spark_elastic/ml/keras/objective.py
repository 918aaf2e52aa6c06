"""The losses of a Keras model as numerators and denominators, which are added up over parts of a batch and workers.

The denominator of most losses is the number of elements, of which each worker has its share of the rows. That of a loss
with a mask, with ignored classes, or divided by sample weights is counted: it is added up over workers before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import get_loss

from spark_elastic.errors import DataError

SUM, BY_WEIGHT = "sum", "mean_with_sample_weight"


@dataclass
class Shares:
    """The part that some rows are of their global batch; numbers, or tensors while a graph is traced."""

    count: Any = 1.0
    rows: Any = 1.0  # the number of these rows, `count`, divided by the rows of the batch
    totals: Sequence[Any] = ()  # the denominator of each loss in the whole batch; [] if these rows are the whole batch
    terms: int = 0  # the number of losses
    counted: set[int] = field(default_factory=set)  # the losses whose denominators are counted, once a step is traced
    scalars: set[int] = field(default_factory=set)  # the numbers of the losses that return one value for all rows
    values: dict[int, Any] = field(default_factory=dict)  # the value of each loss for these rows, by its number
    counts: dict[int, Any] = field(default_factory=dict)  # the denominator of each counted loss in these rows
    building: bool = False  # losses return zero, because only the structure of the model's losses is needed

    @contextmanager
    def for_part(self, part: Any) -> Iterator[None]:
        """Set (count, rows, *totals) from a tensor within a `with` block; a graph's tensors are unusable outside."""
        self.count, self.rows, *self.totals = tf.unstack(part)
        try:
            yield
        finally:
            self.count = self.rows = 1.0
            self.totals = ()
            self.values, self.counts = {}, {}


class ScaledLoss(keras.losses.Loss):
    """A loss that is scaled so that its values times `shares.rows`, added up over workers, are the batch's loss.

    The sum of the values times sample weights and mask is divided by the denominator of the whole batch: the number of
    unmasked elements, or the sum of their weights for "mean_with_sample_weight"; or by one that the loss returns.
    """

    def __init__(self, given: Any, shares: Shares, number: int = 0) -> None:
        by_shape = str(given).lower() in ("crossentropy", "ce")  # these names stand for a loss by the labels' shape
        self._loss: Any = None if by_shape else get_loss(given, None, None)
        self._given, self._shares, self.number = given, shares, number
        name, reduction = getattr(self._loss, "name", given), getattr(self._loss, "reduction", "sum_over_batch_size")
        super().__init__(name=name, reduction=reduction, dtype=getattr(self._loss, "dtype", None))

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        shares = self._shares
        if shares.building:
            return keras.ops.zeros((), self.dtype)
        numerator, denominator = self._fraction(y_true, y_pred, sample_weight)
        if denominator is not None:
            shares.counted.add(self.number)
            shares.counts[self.number] = denominator
            total = shares.totals[self.number] if shares.totals else denominator
            numerator = numerator * keras.ops.cast(tf.math.reciprocal_no_nan(total * shares.rows), numerator.dtype)
        shares.values[self.number] = numerator
        return numerator

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._loss.call(y_true, y_pred)

    def _fraction(self, y_true: Any, y_pred: Any, weights: Any) -> tuple[Any, Any]:
        """Return the numerator and, as float64, the counted denominator; (value, None) for a mean over the rows."""
        values, mask = self._values(y_true, y_pred, weights)
        if type(self._loss).__call__ is not keras.losses.Loss.__call__:
            weights = None  # it has applied them itself
        if isinstance(values, tuple):
            return self._of_pair(values, weights)
        values = keras.ops.convert_to_tensor(values, self.dtype)
        if not len(values.shape):
            self._shares.scalars.add(self.number)
            mask = None
            if weights is not None:
                values = keras.ops.broadcast_to(values, keras.ops.shape(weights))
        factors = [_aligned(each, values) for each in (weights, mask) if each is not None]
        numerator = values
        for each in factors:
            numerator = numerator * keras.ops.cast(each, values.dtype)
        whole = keras.ops.sum(numerator)
        if self.reduction == SUM:
            return whole / keras.ops.cast(self._shares.rows, whole.dtype), None
        if factors and (self.reduction == BY_WEIGHT or mask is not None) and self.reduction not in (None, "none"):
            counted = factors if self.reduction == BY_WEIGHT else factors[-1:]  # the mask
            product = keras.ops.ones_like(values, dtype="float64")
            for each in counted:
                product = product * keras.ops.cast(each, "float64")
            return whole, keras.ops.sum(product)
        mean = keras.ops.mean(numerator)
        if self.reduction in (None, "none"):  # Keras reports the mean, and its gradient is that of the sum
            whole = whole / keras.ops.cast(self._shares.rows, whole.dtype)
            mean = whole + keras.ops.stop_gradient(mean - whole)
        return mean, None

    def _values(self, y_true: Any, y_pred: Any, weights: Any) -> tuple[Any, Any]:
        """Call the loss; return its values, and the mask of the output and of the values."""
        if self._loss is None:
            self._loss = get_loss(self._given, y_true, y_pred)
        if type(self._loss).__call__ is not keras.losses.Loss.__call__:
            return self._loss(y_true, y_pred, weights), None
        tensors = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, self.dtype), (y_true, y_pred))
        values = self.call(*tensors)
        masks = [mask for x in (y_pred, values) if (mask := getattr(x, "_keras_mask", None)) is not None]
        if len(masks) == 2:
            return values, keras.ops.logical_and(*masks)
        return values, masks[0] if masks else None

    def _of_pair(self, pair: tuple[Any, ...], weights: Any) -> tuple[Any, Any]:
        if len(pair) != 2:
            raise DataError(
                f"the loss {self.name} returned {len(pair)} values; two would be a numerator and a denominator"
            )
        numerator, denominator = (keras.ops.convert_to_tensor(each, self.dtype) for each in pair)
        if weights is not None:
            if not len(numerator.shape) or not len(denominator.shape):
                self._shares.scalars.add(self.number)
                return numerator, keras.ops.cast(keras.ops.sum(denominator), "float64")
            numerator = numerator * keras.ops.cast(_aligned(weights, numerator), self.dtype)
            if self.reduction == BY_WEIGHT:
                denominator = denominator * keras.ops.cast(_aligned(weights, denominator), self.dtype)
        return keras.ops.sum(numerator), keras.ops.sum(keras.ops.cast(denominator, "float64"))


def _aligned(factor: Any, values: Any) -> Any:
    """Give weights or a mask of the rows, or of their first axes, as many axes as the values have."""
    factor = keras.ops.convert_to_tensor(factor)
    missing = len(values.shape) - len(factor.shape)
    if missing < 0 and any(n != 1 for n in factor.shape[missing:]):
        raise DataError(
            f"the loss returned values of shape {list(values.shape)}, and its mask or sample weights have the shape "
            f"{list(factor.shape)}; return a value for each element of the mask"
        )
    shape = keras.ops.shape(factor)
    return keras.ops.reshape(factor, shape[:missing] if missing < 0 else (*shape, *[1] * missing))


def variables_of_losses(model: Any) -> list[Any]:
    """Return the variables that the losses of a model have as attributes: a count of steps, and the like."""
    flat = getattr(model._compile_loss, "_flat_losses", None) or []
    values = (value for each in flat for value in vars(each.loss._loss or each.loss).values())
    return list({id(each): each for each in values if isinstance(each, keras.Variable)}.values())


def number_terms(model: Any, shares: Shares) -> None:
    """Give each loss of each output its own `ScaledLoss`, once the model's losses are built."""
    flat = getattr(model._compile_loss, "_flat_losses", None) or []
    for number, each in enumerate(flat):
        flat[number] = each._replace(loss=ScaledLoss(each.loss._given, shares, number))
    shares.terms = len(flat)
