"""The gradients that a model's `train_step` would apply, taken while it is traced.

A `train_step` ends with `optimizer.apply`. Where it is traced with the optimizer recorded, nothing is applied: the
gradients are there once the step is through, with the metrics updated, and both travel together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from spark_elastic.errors import InvalidSettingsError


class Recorded:
    """What one `train_step` has given to its optimizer.

    grads: `tf.Tensor` or `tf.IndexedSlices`, one for each of `variables`.
    """

    def __init__(self, optimizer: Any, share: Any) -> None:
        self.grads: list[Any] = []
        self.variables: list[Any] = []
        self._graph = tf.compat.v1.get_default_graph()
        self._optimizer = optimizer
        self._share = share
        self._scale_loss = optimizer.scale_loss
        self._scaled = False
        self._calls = 0

    def scale_loss(self, loss: Any) -> Any:
        """The share is taken of the loss, which is one number, and not of all the gradients."""
        self._scaled = True
        return self._scale_loss(loss * tf.cast(self._share, loss.dtype))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._calls += 1
        self.grads = list(grads)
        self.variables = list(trainable_variables or self._optimizer._trainable_variables)
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise InvalidSettingsError(
                "train_step calls optimizer.apply inside of a condition, a loop or a function of its own, where its "
                "gradients cannot be reduced over workers; call it at the end of train_step"
            )

    def finish(self) -> None:
        """Raises: InvalidSettingsError: there was not one call of `apply`, or its gradients are no use."""
        if self._calls != 1:
            often = "does not call" if not self._calls else f"calls {self._calls} times"
            raise InvalidSettingsError(
                f"train_step {often} optimizer.apply of the optimizer that the model is compiled with; the gradients "
                "of a step are reduced over workers once, so it has to be called once. With no train_step of its own a "
                "model does so, unless all of its weights are frozen (trainable=False)"
            )
        if all(grad is None for grad in self.grads):
            raise InvalidSettingsError(
                "the loss does not depend on any weight that is trained: they are frozen (trainable=False), or the "
                "model stops the gradient"
            )
        # with other workers a variable that has no gradient takes part with zeros; alone it must not be otherwise
        pairs = [
            _zeros(variable) if grad is None else grad
            for grad, variable in zip(self.grads, self.variables, strict=True)
        ]
        self.grads = pairs if self._scaled else [times(grad, self._share) for grad in pairs]


@contextmanager
def recorded(optimizer: Any, share: Any) -> Iterator[Recorded]:
    """While this lasts, `optimizer.apply` applies nothing.

    share: by which gradients are multiplied.
    """
    record = Recorded(optimizer, share)
    own = {"apply": record.apply, "scale_loss": record.scale_loss}
    for name, function in own.items():
        object.__setattr__(optimizer, name, function)
    try:
        yield record
    finally:
        for name in own:
            object.__delattr__(optimizer, name)
    record.finish()


def _zeros(variable: Any) -> Any:
    return tf.zeros(variable.shape, tf.as_dtype(variable.dtype))


def times(grad: Any, factor: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(times(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
