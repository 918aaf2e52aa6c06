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
from spark_elastic.keras.backend import after
from spark_elastic.tensorflow.gradients import Gradient, GradientReducer, scaled
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
        self._added: Any = None
        self._weights: Any = None
        self._sums: list[tf.Variable] = []
        self._given: set[int] = set()
        """The numbers of the variables with a gradient in a call of this step; in graphs, in any call."""

    def applied(self) -> tf.Tensor:
        """Return the number of steps reduced here that were applied, or that all members skipped."""
        return self._applied.read_value()

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
        return self._reduce(grads, None, variables, local)

    def applies(self, update: Update, grads: Sequence[Gradient]) -> None:
        """Count a step and apply gradients that `reduced` returned."""
        # The counter does not depend on the gradients: without the control dependency a graph would increment it while
        # the reduction runs, also if that fails.
        with after(grads):
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
        """Accumulate the gradients of this call; after the last call of a step, reduce them and apply them by `update`.

        `numbers` are the indices of the gradients' variables in the argument of `build`, `local` the indices of those
        gradients that are not reduced.
        """
        _refuse_xla()
        weight = self.weight
        weights = [None if at in local else weight for at in range(len(grads))]
        weighted = [scaled(grad, factor) for grad, factor in zip(grads, weights, strict=True)]
        if self.passes == 1:
            self.applies(update, self._reduce(weighted, weight, variables, local))
            return
        sums = [self._sums[number] for number in numbers]
        for total, grad in zip(sums, weighted, strict=True):
            if grad is not None:
                total.assign_add(tf.convert_to_tensor(grad))
        if weight is not None:
            self._weights.assign_add(tf.cast(weight, tf.float64))
        added = self._added.assign_add(1)
        self._given.update(number for number, grad in zip(numbers, grads, strict=True) if grad is not None)
        present = [number in self._given for number in numbers]

        def complete() -> tf.Tensor:
            divisor = 1.0 / self.passes if self._average or weight is not None else None
            pairs = zip(sums, present, strict=True)
            totals = [scaled(total.read_value(), divisor) if is_present else None for total, is_present in pairs]
            mean_weight = None if weight is None else self._weights.read_value() / self.passes
            factor = None if weight is None or self._average else float(self.passes)
            reduced = self._reduce(totals, mean_weight, variables, local)
            self.applies(update, [scaled(grad, factor) for grad in reduced])
            self.drop()
            return tf.constant(True)

        if tf.executing_eagerly():
            if int(added) == self.passes:
                complete()
        else:
            tf.cond(tf.equal(added, self.passes), complete, lambda: tf.constant(False))

    def _reduce(
        self, grads: Sequence[Gradient], weight: Any, variables: Sequence[Any], local: Sequence[int]
    ) -> list[Gradient]:
        """Reduce gradients that were already multiplied by `weight`, except those in `local`."""
        shared = [at for at in range(len(grads)) if at not in local]
        scalars = None if weight is None else tf.stack([tf.cast(weight, tf.float64), tf.constant(1.0, tf.float64)])
        trained = [variable for at, variable in enumerate(variables) if at not in local]
        received, scalars = self._reducer([grads[at] for at in shared], scalars, trained)
        # divided by the sum of weights, times the size: the weighted average (or sum)
        ratio = None if scalars is None else scalars[1] / scalars[0]
        out: list[Gradient] = list(grads)
        if local and self.divide_local is not None:
            part = 1.0 / tf.cast(self.divide_local(), tf.float64)
            out = [scaled(grad, part) if at in local else grad for at, grad in enumerate(out)]
        for at, grad in zip(shared, received, strict=True):
            out[at] = scaled(grad, ratio)
        return out


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
        return [sum_rows(torch_of(array), process_set).numpy()]

    def backward(array: Array) -> list[Array]:
        (sums,) = forward(array)
        return [np.zeros_like(sums) if is_without_rows() else sums]

    def gradient(upstream: Any) -> Any:
        return call_host(backward, [upstream], [upstream.dtype], [upstream.shape])[0]

    return call_with_gradient(forward, numbers, numbers.shape, gradient)
