"""One step of a Keras model as graphs: forward, backward, one reduction that carries the metrics along, update.

They are traced once: rows, shares and seeds are tensors, and all that depends on the world is looked up when the
reduction runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from spark_elastic.collective.fused import without_rows
from spark_elastic.collective.reduction import Sum
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.keras.feeding import Feeding, Part
from spark_elastic.ml.keras.metrics import MetricSums
from spark_elastic.ml.keras.objective import Shares
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.gradients import GradientReducer

# The gradients that a model's `train_step` would apply, taken while it is traced.
#
# A `train_step` ends with `optimizer.apply`. Where it is traced with the optimizer recorded, nothing is applied: the
# gradients are there once the step is through, with the metrics updated, and both travel together.


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


OF_PART = tf.TensorSpec([3], tf.float64)
"""Of some rows: their number, and their shares of the batch by number and by weight. Each tensor that is made for a
call costs time, so several numbers are one."""
OF_STEP = tf.TensorSpec([3], tf.int64)
"""The step's key, which is two numbers, and whether this worker asks for the end."""


class Kind(NamedTuple):
    """What stands for a gradient on a worker that has no rows of a batch. sparse: the shape of one of its entries."""

    dtype: Any
    shape: tuple[int, ...]
    sparse: tuple[int, ...] | None = None
    index: Any = None


class Steps:
    """The graphs of one model.

    Args:
        buffers: what a forward pass changes: running means and the like.
        seeds: the states of the model's random generators.
        shares: what the losses are scaled by, see `objective`.

    Raises: InvalidSettingsError: the model's train_step cannot be used.
    """

    def __init__(
        self,
        training: KerasTraining,
        *,
        model: Any,
        feeding: Feeding,
        sums: MetricSums,
        shares: Shares,
        buffers: Sequence[Any],
        seeds: Sequence[Any],
    ) -> None:
        self._training = training
        self._model = model
        self._optimizer = model.optimizer
        self._feeding = feeding
        self._sums = sums
        self._shares = shares
        self._buffers = list(buffers)
        self._seeds = list(seeds)
        self._before = [tf.Variable(each.value, trainable=False) for each in buffers]
        self._reducer = GradientReducer(op=Sum, compression=getattr(Compression, training.compression))
        self._variables: list[Any] = []
        self._kinds: list[Kind] = []
        specs = tuple(feeding.specs)

        def graph(function: Any, *signature: Any) -> Any:
            # as Keras traces a train_step: what is in it may not be made for autograph
            return tf.function(function, input_signature=list(signature) or None, autograph=False)

        self._begin = graph(self._begun, OF_STEP)
        self._part = graph(self._gradients, specs, OF_PART)
        self._add, self._finish = graph(_sum), graph(self._finished)
        self._idle = graph(self._idle_step, OF_STEP)
        self._stand_in = graph(self._standing_in, specs, OF_PART)
        self._reset, self._read = graph(sums.reset), graph(sums.read)
        # Here, because a worker that has no rows of the first batches has to know the others' gradients; and what is
        # traced once and for all is called without a look at what it is called with.
        self._traced_whole = graph(self._whole_step, specs, OF_PART, OF_STEP)
        self._whole = self._traced_whole.get_concrete_function()
        if training.validates:
            self._evaluate = graph(self._evaluated, specs, OF_PART).get_concrete_function()

    # --- what a step consists of, in graphs -------------------------------------------------------

    def _begun(self, of_step: Any) -> None:
        """Remember what a failed step has to be undone of; seeds and metrics are the step's own."""
        for copy, variable in zip(self._before, self._buffers, strict=True):
            # the assignment shares the buffer; whoever changes the variable next copies it first
            copy.assign(variable.value.read_value(), read_value=False)
        for number, seed in enumerate(self._seeds):
            seed.assign(tf.cast(of_step[:2] + tf.constant([number, 0], tf.int64), seed.dtype))
        self._sums.reset()

    def _gradients(self, tensors: Any, of_part: Any) -> tuple[list[Any], Any]:
        """Of some rows; and what the train_step has returned, times the rows."""
        rows, share, weight_share = tf.unstack(of_part)
        with self._shares.of(rows, share, weight_share), recorded(self._optimizer, share) as record:
            logs = self._model.train_step(self._feeding.structure(tensors))
        if not self._kinds:
            self._variables = record.variables
            self._kinds = [_kind(grad) for grad in record.grads]
        return record.grads, self._sums.of_returned("", logs, rows)

    def _finished(self, grads: list[Any], returned: Any, rows: Any, of_step: Any) -> Any:
        """The reduction, and the optimizer's step. Returns what was measured over all workers."""
        numbers = tf.concat([self._sums.read(), returned, tf.stack([rows, tf.cast(of_step[2], tf.float64)])], 0)
        grads, numbers = self._reducer(grads, numbers)
        grads = [_added_up(grad) for grad in grads]
        # Not all that an optimizer changes depends on a gradient: its count of steps does not.
        with tf.control_dependencies([*tf.nest.flatten(grads, expand_composites=True), numbers]):
            self._optimizer.apply(self._clipped(grads), self._variables)
        return numbers

    def _clipped(self, grads: list[Any]) -> list[Any]:
        norm, value = self._training.clip_norm, self._training.clip_value
        scale = self._optimizer.scale_loss(tf.constant(1.0))  # gradients are larger by as much as the loss is
        if norm is not None:
            squares = [tf.reduce_sum(tf.cast(_values(grad), tf.float64) ** 2) for grad in grads]
            longest = norm * tf.cast(scale, tf.float64)
            grads = [times(grad, longest / tf.maximum(longest, tf.sqrt(tf.add_n(squares)))) for grad in grads]
        if value is not None:
            grads = [_bounded(grad, value * tf.cast(scale, grad.dtype)) for grad in grads]
        return grads

    def _whole_step(self, tensors: Any, of_part: Any, of_step: Any) -> Any:
        self._begun(of_step)
        grads, returned = self._gradients(tensors, of_part)
        return self._finished(grads, returned, of_part[0], of_step)

    def _idle_step(self, of_step: Any) -> Any:
        """Without rows: no forward pass, of which running means and losses would be no numbers."""
        self._begun(of_step)
        grads, returned = self._of_no_rows()
        return self._finished(grads, returned, tf.zeros([], tf.float64), of_step)

    def _of_no_rows(self) -> tuple[list[Any], Any]:
        return [_nothing(kind) for kind in self._kinds], tf.zeros([len(self._sums.returned[""])], tf.float64)

    def _standing_in(self, tensors: Any, of_part: Any) -> None:
        """A pass over rows that do not count, for the collectives in it."""
        held = self._sums.held()
        self._gradients(tensors, of_part)
        self._sums.put_back(held)

    def _evaluated(self, tensors: Any, of_part: Any) -> Any:
        rows, share, weight_share = tf.unstack(of_part)
        with self._shares.of(rows, share, weight_share):
            logs = self._model.test_step(self._feeding.structure(tensors))
        return self._sums.of_returned("val_", logs, rows)

    # --- calls ------------------------------------------------------------------------------------

    def step(
        self,
        parts: Sequence[Part],
        shares: Sequence[Shares],
        key: Sequence[int],
        stop: bool,
        stand_ins: Sequence[Part] = (),
    ) -> Any:
        """The gradients of all parts, reduced and applied. Returns: float64 tensor, see `MetricSums`, then the stop
        flags. Either all of it happens or, once `put_back` was called, nothing.

        stand_ins: rows that go through the model after the parts and do not count, where layers wait for that.
        Raises: HorovodInternalError, in one of TensorFlow's errors.
        """
        of_step = tf.constant([*key, int(stop)], tf.int64)
        if not parts and not stand_ins:
            return self._idle(of_step)
        if len(parts) == 1 and not stand_ins:
            return self._whole(*_arguments(parts[0], shares[0]), of_step)
        self._begin(of_step)
        summed = None
        for part, share in zip(parts, shares, strict=True):
            of_part = self._part(*_arguments(part, share))
            summed = of_part if summed is None else self._add(summed, of_part)
        with without_rows():
            for part in stand_ins:
                self._stand_in(*_arguments(part, Shares(0.0, 0.0)))
        grads, returned = self._of_no_rows() if summed is None else summed
        rows = tf.constant(float(sum(part.rows for part in parts)), tf.float64)
        return self._finish(grads, returned, rows, of_step)

    def put_back(self) -> None:
        """Undo what the forward pass of a step that failed has changed."""
        for variable, copy in zip(self._buffers, self._before, strict=True):
            variable.assign(copy)

    def reset(self) -> None:
        self._reset()

    def evaluate(self, part: Part, share: Shares) -> Any:
        """Add to the metrics; returns what else there is, float64."""
        return self._evaluate(*_arguments(part, share))

    def read(self) -> Any:
        return self._read()

    @property
    def traces(self) -> int:
        """How often a step was traced."""
        return int(self._traced_whole.experimental_get_tracing_count())


def _arguments(part: Part, share: Shares) -> tuple[Any, ...]:
    return part.tensors, tf.constant([part.rows, share.rows, share.weight], tf.float64)


def _kind(grad: Any) -> Kind:
    if isinstance(grad, tf.IndexedSlices):
        shape = tuple(tf.get_static_value(grad.dense_shape).tolist())
        return Kind(grad.values.dtype, shape, tuple(grad.values.shape[1:]), grad.indices.dtype)
    return Kind(grad.dtype, tuple(grad.shape))


def _nothing(kind: Kind) -> Any:
    if kind.sparse is None:
        return tf.zeros(kind.shape, kind.dtype)
    values, indices = tf.zeros([0, *kind.sparse], kind.dtype), tf.zeros([0], kind.index)
    return tf.IndexedSlices(values, indices, tf.constant(kind.shape, kind.index))


def _sum(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
    return [_plus(a, b) for a, b in zip(one[0], other[0], strict=True)], one[1] + other[1]


def _plus(one: Any, other: Any) -> Any:
    if isinstance(one, tf.IndexedSlices):  # equal indices add up where they are applied
        values = tf.concat([one.values, other.values], 0)
        return tf.IndexedSlices(values, tf.concat([one.indices, other.indices], 0), one.dense_shape)
    return one + other


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _added_up(grad: Any) -> Any:
    """With one entry for each index: of entries that several rows or workers have in common, an optimizer that takes
    each by itself would make something else, and so would a bound.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    places, which = tf.unique(grad.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(grad.values, which, tf.size(places)), places, grad.dense_shape)


def _bounded(grad: Any, most: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_bounded(grad.values, most), grad.indices, grad.dense_shape)
    return tf.clip_by_value(grad, -most, most)
