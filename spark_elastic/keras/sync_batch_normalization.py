"""SyncBatchNormalization: batch normalisation of Keras with the mean and variance of all ranks' rows."""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras import ops

from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import BACKEND

if BACKEND == "torch":
    from spark_elastic.keras.torch_backend import sum_over_members
else:
    from spark_elastic.keras.tensorflow_backend import sum_over_members

_Plain: Any = keras.layers.BatchNormalization


@keras.saving.register_keras_serializable("spark_elastic")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """A `keras.layers.BatchNormalization` over the rows of all ranks.

    In training, mean and variance are computed over all members' rows. The number of rows may differ between ranks and
    may be 0. Gradients flow through the statistics. All members must call the layer equally often. The members are
    those of the world at the time of each call, also in a graph that was traced earlier. In inference, and in a world
    of one, the layer computes the same as `keras.layers.BatchNormalization`.

    Args:
        *args: arguments of `keras.layers.BatchNormalization`.
        fused: must be False; for compatibility with Horovod.
        process_set: the processes whose rows are normalised together; it is not part of the layer's configuration.
        **options: keyword arguments of `keras.layers.BatchNormalization`.

    Raises:
        HorovodInternalError: a peer is gone (in training).
    """

    def __init__(
        self, *args: Any, fused: bool = False, process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        if fused:
            raise UsageError("SyncBatchNormalization does not support fused=True; remove the argument")
        super().__init__(*args, **options)
        self._set_members(process_set)

    def _set_members(self, process_set: ProcessSet = global_process_set) -> None:
        # Keras' own __setattr__ would track the process set as part of the layer's state
        object.__setattr__(self, "_members", process_set)
        self.supports_jit = False  # the reduction calls Python, which graphs compiled by XLA cannot

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance of all members' rows, shape (channels,).

        Each member sends count, mean and variance of its rows, which are merged in float64. For float64 inputs that
        would lose precision, so variances are taken about the common mean, which needs a second reduction.
        """
        axes = self._reduction_axes
        count, mean, var = _local_statistics(inputs, axes, mask)
        if keras.backend.standardize_dtype(inputs.dtype) == "float64":
            total, sums = ops.split(self._summed([count, mean * count]), 2)
            total = ops.maximum(total, 1.0)
            common = sums / total
            merged = self._summed([(var + ops.square(mean - common)) * count]) / total
        else:
            numbers = [count, mean * count, (var + ops.square(mean)) * count]
            total, sums, squares = ops.split(self._summed(numbers), 3)
            total = ops.maximum(total, 1.0)
            common = sums / total
            merged = ops.maximum(squares / total - ops.square(common), 0.0)
        return ops.cast(common, inputs.dtype), ops.cast(merged, inputs.dtype)

    def _summed(self, parts: list[Any]) -> Any:
        return sum_over_members(ops.concatenate(parts), self._members)


def _local_statistics(inputs: Any, axes: list[int], mask: Any) -> tuple[Any, Any, Any]:
    """Return count, mean and variance of this rank's values in each channel: float64, shape (channels,)."""
    weights = ops.ones_like(inputs)
    if mask is not None:
        weights = weights * ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
    kept = ops.sum(weights, axes, keepdims=True)
    divisor = ops.maximum(kept, 1.0)
    mean = ops.sum(inputs * weights, axes, keepdims=True) / divisor
    deviations = (inputs - ops.stop_gradient(mean)) * weights
    var = ops.sum(ops.square(deviations), axes, keepdims=True) / divisor
    count, mean, var = (ops.cast(ops.reshape(each, [-1]), "float64") for each in (ops.stop_gradient(kept), mean, var))
    return count, mean, var


def convert(model: Any) -> None:
    """Replace the batch normalisation layers of a model by synchronised ones, in place, before it is traced.

    Weights, names and configurations do not change. Layers whose class overrides `call` or `_moments` are not
    converted, see `unconverted`.
    """
    for layer in model._flatten_layers():
        if _is_convertible(layer):
            object.__setattr__(layer, "__class__", _synchronised(layer.__class__))
            layer._set_members()


def unconverted(model: Any) -> list[str]:
    """Return the names of the batch normalisation layers that `convert` cannot convert."""
    return [
        f"{layer.name} ({type(layer).__name__})"
        for layer in model._flatten_layers()
        if isinstance(layer, _Plain) and not isinstance(layer, SyncBatchNormalization) and not _is_convertible(layer)
    ]


def _is_convertible(layer: Any) -> bool:
    kind = type(layer)
    if not isinstance(layer, _Plain) or isinstance(layer, SyncBatchNormalization):
        return False
    return all(getattr(kind, name, None) is getattr(_Plain, name, 0) for name in ("call", "_moments"))


@functools.cache
def _synchronised(kind: Any) -> type:
    bases = (SyncBatchNormalization, kind)
    return SyncBatchNormalization if kind is _Plain else type(f"Sync{kind.__name__}", bases, {})
