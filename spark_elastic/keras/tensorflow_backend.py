"""Reductions of Keras on TensorFlow, eagerly or inside a `tf.function`: gradients of a step, and batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # private; no public function recognises a graph for XLA

from spark_elastic.collective.batch_statistics import is_without_rows, sum_rows
from spark_elastic.collective.process_sets import ProcessSet
from spark_elastic.errors import UsageError
from spark_elastic.tensorflow.gradients import Gradient, GradientReducer
from spark_elastic.tensorflow.host import Array, call_host, call_with_gradient, torch_of

Update = Callable[[list[Gradient]], None]


class TensorFlowSteps:
    """The steps of an optimizer: adds up or averages gradients of `passes` calls, reduces and applies them."""

    def __init__(self, reducer: GradientReducer, passes: int, average: bool) -> None:
        self.passes = passes
        self.weight: Any = None
        """The weight of this member's gradients, while a step is traced or run; None: all members weigh the same."""
        self.divide_local: Callable[[], Any] | None = None
        """A function that returns the divisor of the gradients of local variables; None: 1."""
        self._reducer = reducer
        self._average = average
        self._applied = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps_applied")
        self._added: tf.Variable | None = None
        self._weights: tf.Variable | None = None
        self._sums: list[tf.Variable] = []
        self._given: set[int] = set()
        """The numbers of the variables with a gradient in a call of this step; in graphs, in any call."""

    def applied(self) -> tf.Tensor:
        """Return the number of steps reduced here that were applied, or that all members skipped."""
        return self._applied.read_value()

    def set_applied(self, count: Any) -> None:
        """Set the number that `applied` returns."""
        self._applied.assign(count)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the accumulators of the variables' gradients."""
        if self.passes == 1 or self._sums:
            return
        with tf.init_scope():
            self._added = tf.Variable(0, dtype=tf.int64, trainable=False, name="passes")
            self._weights = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="weights")
            self._sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def at_boundary(self) -> Any:
        """Return True if the next call begins a step; in a graph, a tensor."""
        return True if self._added is None else tf.equal(self._added, 0)

    def drop(self) -> None:
        """Discard the gradients accumulated for an unfinished step."""
        for variable in (self._added, self._weights, *self._sums):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))
        if tf.executing_eagerly():
            self._given.clear()

    def reduced(self, grads: Sequence[Gradient], variables: Sequence[Any], local: Sequence[int] = ()) -> list[Gradient]:
        """Reduce gradients without applying them or counting a step."""
        received, _ = self._reducer(_without(grads, local), None, _others(variables, local))
        return self._with_local(received, grads, local)

    def applies(self, update: Update, grads: Sequence[Gradient]) -> None:
        """Count a step and apply gradients that `reduced` returned."""
        # The counter does not depend on the gradients: without the control dependency a graph would increment it while
        # the reduction runs, also if that fails.
        with tf.control_dependencies(tf.nest.flatten([g for g in grads if g is not None], expand_composites=True)):
            self._applied.assign_add(1, read_value=False)
            update(list(grads))

    def step(
        self,
        grads: Sequence[Gradient],
        numbers: Sequence[int],
        update: Update,
        variables: Sequence[Any],
        local: Sequence[int] = (),
    ) -> None:
        """Accumulate the gradients of this call; after the last call of a step, reduce and apply them.

        Args:
            grads: the gradients of this call.
            numbers: for each gradient, the index of its variable in the argument of `build`.
            update: a function that applies reduced gradients.
            variables: the variables of the gradients.
            local: indices of the gradients that are not reduced.
        """
        _refuse_xla()
        weight, shared = self.weight, _others(variables, local)
        if self.passes == 1:
            weighted = [_scaled(grad, None if at in local else weight) for at, grad in enumerate(grads)]
            self._finish(weighted, weight, None, update, shared, local)
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
        self._given.update(number for number, grad in zip(numbers, grads, strict=True) if grad is not None)
        present = [number in self._given for number in numbers]

        def complete() -> tf.Tensor:
            assert self._weights is not None
            divisor = 1.0 / self.passes if self._average or weight is not None else None
            totals = [
                _scaled(total.read_value(), divisor) if is_present else None
                for total, is_present in zip(sums, present, strict=True)
            ]
            mean_weight = None if weight is None else self._weights.read_value() / self.passes
            factor = None if weight is None or self._average else float(self.passes)
            self._finish(totals, mean_weight, factor, update, shared, local)
            self.drop()
            return tf.constant(True)

        if tf.executing_eagerly():
            if int(added) == self.passes:
                complete()
        else:
            tf.cond(tf.equal(added, self.passes), complete, lambda: tf.constant(False))

    def _finish(
        self,
        grads: Sequence[Gradient],
        weight: Any,
        factor: float | None,
        update: Update,
        shared: Sequence[Any],
        local: Sequence[int],
    ) -> None:
        """Reduce gradients that were already multiplied by `weight`, multiply them by `factor` and apply them."""
        scalars = None if weight is None else tf.stack([tf.cast(weight, tf.float64), tf.constant(1.0, tf.float64)])
        reduced, scalars = self._reducer(_without(grads, local), scalars, shared)
        if scalars is not None:  # divided by the sum of weights, times the size: the weighted average (or sum)
            reduced = [_scaled(grad, scalars[1] / scalars[0]) for grad in reduced]
        reduced = self._with_local(reduced, grads, local)
        self.applies(update, [_scaled(grad, factor) for grad in reduced])

    def _with_local(self, reduced: list[Gradient], grads: Sequence[Gradient], local: Sequence[int]) -> list[Gradient]:
        if not local:
            return reduced
        factor = None if self.divide_local is None else 1.0 / tf.cast(self.divide_local(), tf.float64)
        return [_scaled(grads[at], factor) if at in local else grad for at, grad in enumerate(reduced)]


def _others(variables: Sequence[Any], local: Sequence[int]) -> list[Any]:
    return [variable for at, variable in enumerate(variables) if at not in local]


def _without(grads: Sequence[Gradient], local: Sequence[int]) -> list[Gradient]:
    return [None if at in local else grad for at, grad in enumerate(grads)]


def _scaled(grad: Gradient, factor: Any) -> Gradient:
    if grad is None or factor is None:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _refuse_xla() -> None:
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "gradients cannot be reduced inside a function that XLA compiles: compile the model with "
            "model.compile(..., jit_compile=False), and do not call a DistributedOptimizer in "
            "tf.function(jit_compile=True). With Keras' default jit_compile='auto', XLA compiles if there is a GPU"
        )


# --- batch statistics -----------------------------------------------------------------------------


def sum_over_members(numbers: Any, process_set: ProcessSet) -> Any:
    """Sum float64 numbers (n,) over the members, in a forward pass; the gradients are summed in the backward pass."""

    def forward(array: Array) -> list[Array]:
        return [_sums(array, process_set)]

    def backward(array: Array) -> list[Array]:
        sums = _sums(array, process_set)
        return [np.zeros_like(sums) if is_without_rows() else sums]

    def gradient(upstream: Any) -> Any:
        return call_host(backward, [upstream], [upstream.dtype], [upstream.shape])[0]

    return call_with_gradient(forward, numbers, numbers.shape, gradient)


def _sums(array: Array, process_set: ProcessSet) -> Array:
    sums: Array = sum_rows(torch_of(array), process_set).numpy()
    return sums
