"""DistributedGradientTape: a gradient tape that returns gradients averaged over the world."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp
from spark_elastic.tensorflow.compression import Compression, Compressor
from spark_elastic.tensorflow.gradients import GradientReducer
from spark_elastic.tensorflow.operations import size_op
from spark_elastic.tensorflow.tensors import native


class _ReducingTape:
    """A proxy of a tape whose `gradient` reduces; everything else is passed to the tape."""

    def __init__(
        self, tape: tf.GradientTape, reducer: GradientReducer, scale_local: bool, process_set: ProcessSet
    ) -> None:
        self._tape = tape
        self._reducer = reducer
        self._scale_local = scale_local
        self._process_set = process_set
        self._local: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> _ReducingTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient with respect to a variable from the reduction."""
        self._local.add(_key(source))

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        """Return the gradients of `tf.GradientTape.gradient`, reduced over the members.

        Raises:
            HorovodInternalError: a peer is gone. Inside a tf.function, TensorFlow raises an error of its own class
                instead.
        """
        nested = self._tape.gradient(target, sources, output_gradients, **kwargs)
        flat = tf.nest.flatten(nested, expand_composites=False)
        wanted = tf.nest.flatten(sources)
        shared = [at for at, source in enumerate(wanted) if _key(source) not in self._local]
        reduced, _ = self._reducer([flat[at] for at in shared])
        for at, grad in zip(shared, reduced, strict=True):
            flat[at] = grad
        if self._scale_local and len(shared) < len(flat):
            size = size_op(self._process_set)
            for at in set(range(len(flat))) - set(shared):
                flat[at] = _divided(flat[at], size)
        return tf.nest.pack_sequence_as(nested, flat, expand_composites=False)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return two lists of (source, gradient): of the local sources, and of the reduced others."""
        wanted = tf.nest.flatten(sources)
        pairs = list(zip(wanted, self.gradient(target, wanted, output_gradients, **kwargs), strict=True))
        local = [pair for pair in pairs if _key(pair[0]) in self._local]
        return local, [pair for pair in pairs if _key(pair[0]) not in self._local]


def _divided(grad: Any, size: tf.Tensor) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(grad.values, size), grad.indices, grad.dense_shape)
    return None if grad is None else grad / tf.cast(size, grad.dtype)


def _key(source: Any) -> Any:
    """Return a hashable key that is equal for a Keras variable and its tf.Variable."""
    own = native(source)
    return own.ref() if hasattr(own, "ref") else id(own)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    local_sources: Iterable[Any] = (),
) -> Any:
    """Return a tape whose `gradient` averages the gradients over all members, in one message.

    Args:
        gradtape: a tape, before or after use; `with hvd.DistributedGradientTape(tf.GradientTape()) as t` works too.
        device_dense: has no effect; for compatibility with Horovod.
        device_sparse: has no effect.
        compression: the compressor of the sent gradients.
        sparse_as_dense: reduce IndexedSlices as dense tensors instead of gathering them.
        op: Average or Sum.
        gradient_predivide_factor: divisor of gradients before the sum; sums are divided by size / factor.
        num_groups: has no effect: there is one message per step.
        groups: has no effect.
        process_set: the processes to reduce over.
        scale_local_gradients: divide the gradients of `local_sources` by the size.
        local_sources: variables whose gradients are not reduced.

    Raises:
        UsageError: the arguments contradict each other.
    """
    reducer = GradientReducer(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    tape = _ReducingTape(gradtape, reducer, scale_local_gradients, process_set)
    for source in local_sources:
        tape.register_local_source(source)
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        gradtape: as for `DistributedGradientTape`.
        device_dense: has no effect; for compatibility with Horovod.
        device_sparse: has no effect.
        compression: as for `DistributedGradientTape`.
        sparse_as_dense: as for `DistributedGradientTape`.
        op: as for `DistributedGradientTape`.
        gradient_predivide_factor: as for `DistributedGradientTape`.
        num_groups: has no effect.
        groups: has no effect.
        process_set: as for `DistributedGradientTape`.
        local_layers: the layer or layers whose variables each worker trains by itself.
        scale_local_gradients: divide their gradients by the size.
    """
    layers = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    local = [variable for layer in layers if layer is not None for variable in layer.trainable_weights]
    return DistributedGradientTape(
        gradtape,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        local_sources=local,
    )
