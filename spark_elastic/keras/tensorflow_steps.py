"""An optimizer's steps under TensorFlow: gradients are added up and reduced, eagerly or inside of a `tf.function`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # private, and nothing public tells a graph for XLA

from spark_elastic.errors import UsageError
from spark_elastic.tensorflow.gradients import GradientReducer

Gradient = Any
Update = Callable[[list[Gradient]], None]


class Steps:
    """Reduces the gradients of one optimizer before they are applied.

    Args:
        reducer: what reduces them.
        passes: calls whose gradients are added up here before they are reduced.
        average: divide what was added up by `passes`.
    """

    def __init__(self, reducer: GradientReducer, passes: int, average: bool) -> None:
        self.passes = passes
        self.weight: Any = None
        """While a step is traced or run: what its gradients weigh among the members'; None: all the same."""
        self.before_update: Callable[[], None] | None = None
        """Called when the gradients have been reduced and the step counted, before they are applied."""
        self.divide_local: Callable[[], Any] | None = None
        """Gives what the gradients of this member's own variables are divided by; None: they stay as they are."""
        self._reducer = reducer
        self._average = average
        self._applied = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps_applied")
        self._added: tf.Variable | None = None
        self._weights: tf.Variable | None = None
        self._sums: list[tf.Variable] = []

    def applied(self) -> tf.Tensor:
        """Steps that were reduced here and then applied, or skipped by all members alike."""
        return self._applied.read_value()

    def build(self, variables: Sequence[Any]) -> None:
        """Make room for the gradients that are added up."""
        if self.passes == 1 or self._sums:
            return
        with tf.init_scope():
            self._added = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes")
            self._weights = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="weights")
            self._sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def at_boundary(self) -> Any:
        """Whether the next call begins a step, as a tensor in a graph."""
        return True if self._added is None else tf.equal(self._added, 0)

    def drop(self) -> None:
        """Forget the gradients of a step that was begun."""
        for variable in (self._added, self._weights, *self._sums):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))

    def reduced(self, grads: Sequence[Gradient], local: Sequence[int] = ()) -> list[Gradient]:
        """The gradients as they are applied, without a step."""
        received, _ = self._reducer([None if at in local else grad for at, grad in enumerate(grads)], None)
        return self._with_own(received, grads, local)

    def applies(self, update: Update, grads: Sequence[Gradient]) -> None:
        """Hand gradients that `reduced` has given to `update`, as a step."""
        with tf.control_dependencies([_dense_part(grad) for grad in grads if grad is not None]):
            self._applied.assign_add(1, read_value=False)
            if self.before_update is not None:
                self.before_update()
            update(list(grads))

    def step(
        self, grads: Sequence[Gradient], numbers: Sequence[int], update: Update, local: Sequence[int] = ()
    ) -> None:
        """Add up the gradients of this call; with the last of a step, reduce them and hand them to `update`.

        numbers: the variable of each gradient, as they were numbered in `build`. local: the places of the gradients
        that are not reduced.
        """
        _refuse_xla()
        weight = self.weight
        if self.passes == 1:
            self._reduce(list(grads), None if weight is None else tf.cast(weight, tf.float64), update, local)
            return
        assert self._added is not None
        assert self._weights is not None
        sums = [self._sums[number] for number in numbers]
        for at, (total, grad) in enumerate(zip(sums, grads, strict=True)):
            if grad is not None:
                total.assign_add(tf.convert_to_tensor(_scaled(grad, None if at in local else weight)))
        if weight is not None:
            self._weights.assign_add(tf.cast(weight, tf.float64))
        added = self._added.assign_add(1)
        present = [grad is not None for grad in grads]

        def complete() -> tf.Tensor:
            factor = 1.0 / self.passes if self._average or weight is not None else None
            whole = [
                _scaled(total.read_value(), factor) if there else None
                for total, there in zip(sums, present, strict=True)
            ]
            if weight is None:
                self._reduce(whole, None, update, local)
            else:
                assert self._weights is not None
                again = None if self._average else float(self.passes)
                self._finish(whole, self._weights.read_value() / self.passes, again, update, local)
            self.drop()
            return tf.constant(True)

        if tf.executing_eagerly():
            if int(added) == self.passes:
                complete()
        else:
            tf.cond(tf.equal(added, self.passes), complete, lambda: tf.constant(False))

    def _reduce(self, grads: list[Gradient], weight: Any, update: Update, local: Sequence[int]) -> None:
        if weight is not None:
            grads = [grad if at in local else _scaled(grad, weight) for at, grad in enumerate(grads)]
        self._finish(grads, weight, None, update, local)

    def _finish(
        self, grads: list[Gradient], weight: Any, factor: float | None, update: Update, local: Sequence[int]
    ) -> None:
        """Reduce gradients that are multiplied by their weights already, and apply them."""
        carried = None if weight is None else tf.stack([tf.cast(weight, tf.float64), tf.constant(1.0, tf.float64)])
        sent = [None if at in local else grad for at, grad in enumerate(grads)] if local else grads
        reduced, carried = self._reducer(sent, carried)
        if carried is not None:  # of an average (or sum) of weighted gradients, the weighted average (or sum)
            reduced = [_scaled(grad, carried[1] / carried[0]) for grad in reduced]
        if local:
            reduced = self._with_own(reduced, grads, local)
        if factor is not None:
            reduced = [_scaled(grad, factor) for grad in reduced]
        # The counters of a step do not depend on the gradients by themselves: they would be raised beside a reduction
        # that fails.
        with tf.control_dependencies([_dense_part(grad) for grad in reduced if grad is not None]):
            self._applied.assign_add(1, read_value=False)
            if self.before_update is not None:
                self.before_update()
            update(reduced)

    def _with_own(self, reduced: list[Gradient], grads: Sequence[Gradient], local: Sequence[int]) -> list[Gradient]:
        if not local:
            return reduced
        factor = None if self.divide_local is None else 1.0 / tf.cast(self.divide_local(), tf.float64)
        return [_scaled(grads[at], factor) if at in local else grad for at, grad in enumerate(reduced)]


def _scaled(grad: Gradient, factor: Any) -> Gradient:
    if grad is None or factor is None:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _dense_part(grad: Gradient) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _refuse_xla() -> None:
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "gradients cannot be reduced inside of a function that XLA compiles: compile the model with "
            "model.compile(..., jit_compile=False), and do not call a DistributedOptimizer in "
            "tf.function(jit_compile=True). Keras' default jit_compile='auto' means True where there is a GPU"
        )
