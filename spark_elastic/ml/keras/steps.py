"""The graphs of one step of a Keras model: forward, backward, one reduction of gradients and metrics, update.

They are traced once: rows, shares and seeds are tensors, and the reduction looks up the present world when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

from spark_elastic.collective.batch_statistics import without_rows
from spark_elastic.collective.operators import Compression, Sum
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.keras.feeding import BatchFeeder
from spark_elastic.ml.keras.metrics import KerasMetricAccumulator
from spark_elastic.ml.keras.objective import Shares, variables_of_losses
from spark_elastic.ml.training.spec import Training
from spark_elastic.tensorflow.gradients import GradientReducer


class GradientRecord:
    """A context in which `optimizer.apply` records the gradients, multiplied by `share`, instead of applying them.

    So they can be reduced together with the metrics. Raises InvalidSettingsError unless `apply` is called just once.
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

    def __enter__(self) -> GradientRecord:
        for name in ("apply", "scale_loss"):
            object.__setattr__(self._optimizer, name, getattr(self, name))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name in ("apply", "scale_loss"):
            object.__delattr__(self._optimizer, name)
        if kind is None:
            self._finish()

    def scale_loss(self, loss: Any) -> Any:
        """Multiply the loss by the share, which is cheaper than multiplying every gradient."""
        self._scaled = True
        return self._scale_loss(loss * tf.cast(self._share, loss.dtype))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._calls += 1
        self.grads = list(grads)
        self.variables = list(trainable_variables or self._optimizer._trainable_variables)
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise InvalidSettingsError(
                "train_step calls optimizer.apply inside of a condition, a loop or a tf.function, where its gradients "
                "cannot be reduced over workers; call it at the end of train_step"
            )

    def _finish(self) -> None:
        if self._calls != 1:
            often = "does not call" if not self._calls else f"calls {self._calls} times"
            raise InvalidSettingsError(
                f"train_step {often} optimizer.apply of the optimizer that the model is compiled with; the gradients "
                "of a step are reduced over workers once, so it has to be called once. A model without its own "
                "train_step does so, unless all of its weights are frozen (trainable=False)"
            )
        if all(grad is None for grad in self.grads):
            raise InvalidSettingsError(
                "the loss does not depend on any weight that is trained: they are frozen (trainable=False), or the "
                "model stops the gradient"
            )
        if not self._scaled:
            self.grads = [_times(grad, self._share) for grad in self.grads]


_WRITES = re.compile("Assign(Add|Sub)?VariableOp|Resource(Sparse)?Apply|ResourceScatter")  # that change a variable
OF_STEP = tf.TensorSpec([None], tf.int64)
"""The seed of a step, two numbers, and the votes of the `Engine`."""


class StepGraphs:
    """The graphs of one compiled model's steps; they set the `shares` that its losses are scaled by.

    `buffers` are the variables that a forward pass and the losses change: running means and the like.
    """

    def __init__(
        self, training: Training, model: Any, feeder: BatchFeeder, metrics: KerasMetricAccumulator, shares: Shares
    ) -> None:
        self._training = training
        self._model = model
        self._optimizer = model.optimizer
        self._feeder = feeder
        self._metrics = metrics
        self._shares = shares
        self.buffers = [*buffers_of(model), *variables_of_losses(model)]
        self._seeds = seeds_of(model)
        self._before = [tf.Variable(each.value, trainable=False) for each in self.buffers]
        self._reducer = GradientReducer(op=Sum, compression=getattr(Compression, training.gradient_compression))
        self._variables: list[Any] = []
        self._zeros: list[Callable[[], Any]] = []  # make zeros in place of each gradient, for a worker without rows
        specs = tuple(feeder.specs)
        # of the number of rows, their share, and the denominators of the losses: one tensor, because each costs time
        of_part = tf.TensorSpec([2 + shares.terms], tf.float64)

        def graph(function: Any, *signature: Any) -> Any:
            # without autograph, as Keras traces a train_step
            return tf.function(function, input_signature=list(signature) or None, autograph=False)

        self._begin = graph(self._begun, OF_STEP)
        # Traced once for all graphs: a loss may have a state in Python, which each trace would change. A concrete
        # function skips the checks of its arguments at each call.
        self._part = graph(self._gradients, specs, of_part).get_concrete_function()
        _check_unchanged(model, self._part.graph)
        self._add, self._finish = graph(_sum), graph(self._finished)
        self._uncounted = graph(self._uncounted_pass, specs, of_part)
        self._count = graph(self._denominators, specs)
        self.reset, self.read = graph(metrics.reset), graph(metrics.read)
        self._traced_whole = graph(self._whole_step, specs, of_part, OF_STEP)
        self._whole = self._traced_whole.get_concrete_function()
        if training.validates:
            self.evaluate = graph(self._evaluated, specs, of_part).get_concrete_function()

    def _begun(self, of_step: Any) -> None:
        """Save the buffers, so that a failed step can be undone; set the step's seeds and reset the metrics."""
        for copy, variable in zip(self._before, self.buffers, strict=True):
            # the copy shares memory with the variable until the variable changes
            copy.assign(variable.value.read_value(), read_value=False)
        for number, seed in enumerate(self._seeds):
            seed.assign(tf.cast(of_step[:2] + tf.constant([number, 0], tf.int64), seed.dtype))
        self._metrics.reset()

    def _gradients(self, tensors: Any, of_part: Any) -> tuple[list[Any], Any]:
        """Return the gradients of some rows, and the values that train_step returned, times the number of rows."""
        with self._shares.for_part(of_part), GradientRecord(self._optimizer, self._shares.rows) as record:
            logs = self._model.train_step(self._feeder.structure(tensors))
        if not self._zeros:
            self._variables = record.variables
            pairs = zip(record.grads, record.variables, strict=True)
            self._zeros = [_zeros_like(grad, tuple(variable.shape)) for grad, variable in pairs]
        return record.grads, self._metrics.of_returned("", logs, of_part[0])

    def _finished(self, grads: list[Any], returned: Any, rows: Any, of_step: Any) -> Any:
        """Reduce, and do the optimizer's step. Returns the sums over all workers, then those of their votes."""
        numbers = tf.concat([self._metrics.read(), returned, [rows], tf.cast(of_step[2:], tf.float64)], 0)
        grads, numbers = self._reducer(grads, numbers)
        # The optimizer's count of steps depends on no gradient, so TensorFlow could increment it before the reduction.
        given = [grad for grad in grads if grad is not None]
        with tf.control_dependencies([*tf.nest.flatten(given, expand_composites=True), numbers]):
            self._optimizer.apply(self._clipped(grads), self._variables)
        return numbers

    def _clipped(self, grads: list[Any]) -> list[Any]:
        norm, value = self._training.gradient_clip_norm, self._training.gradient_clip_value
        scale = self._optimizer.scale_loss(tf.constant(1.0))  # the factor by which loss scaling enlarges gradients
        if norm is not None:
            whole = [_unique_indices(each) for each in grads if each is not None]
            values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in whole]
            squares = [tf.reduce_sum(tf.cast(each, tf.float64) ** 2) for each in values]
            longest = norm * tf.cast(scale, tf.float64)
            grads = [_times(grad, longest / tf.maximum(longest, tf.sqrt(tf.add_n(squares)))) for grad in grads]
        if value is not None:
            most = value * tf.cast(scale, tf.float64)

            def bounded(each: Any) -> Any:
                return tf.clip_by_value(each, tf.cast(-most, each.dtype), tf.cast(most, each.dtype))

            grads = [_map_values(bounded, _unique_indices(grad)) for grad in grads]
        return grads

    def _whole_step(self, tensors: Any, of_part: Any, of_step: Any) -> Any:
        self._begun(of_step)
        grads, returned = self._part(tensors, of_part)
        return self._finished(grads, returned, of_part[0], of_step)

    def _uncounted_pass(self, tensors: Any, of_part: Any) -> None:
        """Run a pass over rows that do not count, for the state and the collectives of the model's layers."""
        before = self._metrics.snapshot()
        self._part(tensors, of_part)
        self._metrics.restore(before)

    def _evaluated(self, tensors: Any, of_part: Any) -> Any:
        """Add a part to the metrics; return the values of a user's test_step, times the rows, float64."""
        with self._shares.for_part(of_part):
            logs = self._model.test_step(self._feeder.structure(tensors))
        return self._metrics.of_returned("val_", logs, of_part[0])

    def _denominators(self, tensors: Any) -> Any:
        """Return the denominators of counted losses of some rows: float64, shape [losses], 0 for the other losses."""
        x, y, weights = (*self._feeder.structure(tensors), None)[:3]
        with keras.StatelessScope():  # neither metrics nor a loss with a state count this call
            self._model._compile_loss(y, self._model(x, training=False), weights)
        counts, self._shares.counts, self._shares.values = self._shares.counts, {}, {}
        none = tf.zeros([], tf.float64)
        return tf.stack([counts.get(number, none) for number in range(self._shares.terms)])

    def totals(self, parts: Iterable[Any], reduce: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        """Return each loss's denominator in the whole batch; `reduce` adds up float64 [losses] over all workers."""
        if not self._shares.counted:
            return [1.0] * self._shares.terms
        own = sum((self._count(part).numpy() for part in parts), np.zeros(self._shares.terms))
        return list(reduce(torch.from_numpy(own)).tolist())

    def step(
        self, parts: Sequence[Any], uncounted: Sequence[Any], global_rows: int, totals: Sequence[float], of_step: Any
    ) -> Any:
        """Reduce the gradients of a batch and apply them. If it raises, `undo_step` undoes it.

        `parts` are this worker's tensors of a batch of `global_rows`, `uncounted` those of passes made only so that
        layers run equally often on all workers. Returns the sums of `KerasMetricAccumulator` over all workers, float64,
        and then those of their votes.
        """
        if len(parts) == 1 and not uncounted:
            return self._whole(*part_arguments(parts[0], global_rows, totals), of_step)
        self._begin(of_step)
        summed = None
        for part in parts:
            of_part = self._part(*part_arguments(part, global_rows, totals))
            summed = of_part if summed is None else self._add(summed, of_part)
        with without_rows():
            for part in uncounted:
                self._uncounted(part, tf.constant([0.0, 0.0, *totals], tf.float64))
        if summed is None:  # no rows
            summed = [zeros() for zeros in self._zeros], tf.zeros([len(self._metrics.returned[""])], tf.float64)
        grads, returned = summed
        rows = tf.constant(float(sum(len(part[0]) for part in parts)), tf.float64)
        return self._finish(grads, returned, rows, of_step)

    def undo_step(self) -> None:
        for variable, copy in zip(self.buffers, self._before, strict=True):
            variable.assign(copy)


def _check_unchanged(model: Any, graph: Any) -> None:
    """Raise InvalidSettingsError if a train_step, traced as this graph, changes trained weights itself."""
    names = {id(variable.value.handle): variable.path for variable in model.trainable_variables}
    inner = {captured.name: names[id(outer)] for outer, captured in graph.captures if id(outer) in names}
    written = [op.inputs[0].name for op in graph.get_operations() if op.inputs and _WRITES.match(op.type)]
    if changed := sorted({inner[name] for name in written if name in inner}):
        raise InvalidSettingsError(
            f"train_step changes {', '.join(changed[:3])} by another optimizer or by an assign, so by the rows of each "
            "worker alone, or before the step that the gradients make. Apply the gradients of all weights by the "
            "optimizer that the model is compiled with, and bound weights by a constraint of their layer"
        )


def part_arguments(part: Sequence[Any], global_rows: int, totals: Sequence[float]) -> tuple[Any, ...]:
    """Return the arguments of a graph for the tensors of some rows of a batch; see `StepGraphs.totals`."""
    rows = len(part[0])
    return part, tf.constant([rows, rows / global_rows, *totals], tf.float64)


def buffers_of(model: Any) -> list[Any]:
    """Return the variables that a forward pass changes, such as moving means; frozen weights are not among them."""
    trained = {id(each) for layer in model._flatten_layers() for each in layer._trainable_variables}
    return [each for each in model.non_trainable_weights if id(each) not in trained]


def seeds_of(model: Any) -> list[Any]:
    known = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in known and tuple(each.shape) == (2,)]


def _zeros_like(grad: Any, shape: tuple[int, ...]) -> Callable[[], Any]:
    """Return a function that makes zeros in place of a gradient of a variable of this shape; a sparse one is empty."""
    if grad is None:
        return lambda: None
    if not isinstance(grad, tf.IndexedSlices):
        return partial(tf.zeros, shape, grad.dtype)
    dtype, index = grad.values.dtype, grad.indices.dtype
    return lambda: tf.IndexedSlices(tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], index), tf.constant(shape, index))


def _map_values(function: Callable[[Any], Any], grad: Any) -> Any:
    """Apply a function to the values of a gradient; of a sparse gradient, to the values of its entries."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return function(grad)


def _times(grad: Any, factor: Any) -> Any:
    return _map_values(lambda values: values * tf.cast(factor, values.dtype), grad)


def _sum(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
    """Add the gradients, and the values that train_step returned, of two parts of a batch."""

    def plus(grad: Any, more: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            values = tf.concat([grad.values, more.values], 0)
            return tf.IndexedSlices(values, tf.concat([grad.indices, more.indices], 0), grad.dense_shape)
        return None if grad is None else grad + more

    return [plus(a, b) for a, b in zip(one[0], other[0], strict=True)], one[1] + other[1]


def _unique_indices(grad: Any) -> Any:
    """Add up entries of a sparse gradient with the same index, which clipping would take for single gradients."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    indices, which = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, which, tf.size(indices))
    return tf.IndexedSlices(values, indices, grad.dense_shape)
