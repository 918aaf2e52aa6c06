"""SyncBatchNormalization: Keras' batch normalisation with the mean and variance of all ranks' rows."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import BACKEND

if BACKEND == "torch":
    from spark_elastic.keras.torch_statistics import added_up
else:
    from spark_elastic.keras.tensorflow_statistics import added_up

_Plain: Any = keras.layers.BatchNormalization


@keras.saving.register_keras_serializable("spark_elastic")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """As `keras.layers.BatchNormalization`, whose arguments it takes, over the rows of all ranks.

    In training, mean and variance are those of all members' rows, weighted by their numbers, which may differ between
    ranks and may be 0; gradients flow through them. All members must call the layer equally often. In inference, and
    in a world of one, it is `keras.layers.BatchNormalization`. The members are those of the world at the time of each
    call, also in a graph that was traced before.

    Args:
        fused: accepted for Horovod's sake; must be False.
        process_set: the processes whose rows are normalised together; it is not part of the layer's configuration.

    Raises (in training): HorovodInternalError: a peer is gone.
    """

    def __init__(
        self, *args: Any, fused: bool = False, process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        if fused:
            raise UsageError("SyncBatchNormalization has no fused form; leave fused=True out")
        super().__init__(*args, **options)
        self._begin(process_set)

    def _begin(self, process_set: ProcessSet = global_process_set) -> None:
        # not tracked: Keras would take what is set on a layer for a part of its state
        object.__setattr__(self, "_members", process_set)
        self.supports_jit = False  # the reduction calls back to this process, which compiled graphs cannot

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance of all members' rows, shape (channels,).

        The variances of the members' rows are about their own means, and are merged in float64. For inputs of float64,
        deviations are taken from the common mean, which needs a second reduction.
        """
        axes = self._reduction_axes
        count, mean, var = _own(inputs, axes, mask)
        if keras.backend.standardize_dtype(inputs.dtype) == "float64":
            total, sums = ops.split(self._added_up([count, mean * count]), 2)
            total = ops.maximum(total, 1.0)
            common = sums / total
            merged = self._added_up([(var + ops.square(mean - common)) * count]) / total
        else:
            numbers = [count, mean * count, (var + ops.square(mean)) * count]
            total, sums, squares = ops.split(self._added_up(numbers), 3)
            total = ops.maximum(total, 1.0)
            common = sums / total
            merged = ops.maximum(squares / total - ops.square(common), 0.0)
        return ops.cast(common, inputs.dtype), ops.cast(merged, inputs.dtype)

    def _added_up(self, parts: list[Any]) -> Any:
        return added_up(ops.concatenate(parts), self._members)


def _own(inputs: Any, axes: list[int], mask: Any) -> tuple[Any, Any, Any]:
    """Return the number of this rank's values of each channel, their mean and variance: float64, (channels,)."""
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
    """Make the batch normalisation layers of a model synchronised ones, in place, before it is traced.

    Weights, names and configurations stay what they are. Layers whose class has a `call` of its own are left as they
    are, see `unconverted`.
    """
    for layer in model._flatten_layers():
        if _is_convertible(layer):
            object.__setattr__(layer, "__class__", _synchronised(type(layer)))
            layer._begin()


def unconverted(model: Any) -> list[str]:
    """Return the names of layers with batch statistics that `convert` leaves as they are."""
    return [
        f"{layer.name} ({type(layer).__name__})"
        for layer in model._flatten_layers()
        if isinstance(layer, _Plain) and not isinstance(layer, SyncBatchNormalization) and not _is_convertible(layer)
    ]


def is_synchronised(model: Any) -> bool:
    """Whether there are layers that take other ranks' statistics."""
    return any(isinstance(layer, SyncBatchNormalization) for layer in model._flatten_layers())


def _is_convertible(layer: Any) -> bool:
    kind = type(layer)
    if not isinstance(layer, _Plain) or isinstance(layer, SyncBatchNormalization):
        return False
    return all(getattr(kind, name, None) is getattr(_Plain, name, 0) for name in ("call", "_moments"))


_classes: dict[type, type] = {_Plain: SyncBatchNormalization}


def _synchronised(kind: type) -> type:
    if kind not in _classes:
        _classes[kind] = type(f"Sync{kind.__name__}", (SyncBatchNormalization, kind), {})
    return _classes[kind]
