"""Reduce the gradients of a step, eagerly or inside a `tf.function`, and `DistributedGradientTape`, which does so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import torch

from spark_elastic.collective import operations
from spark_elastic.collective.fused import FusedReduction
from spark_elastic.collective.operators import Average, Compression, Compressor, ReduceOp
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.replicas import VariableComparison
from spark_elastic.tensorflow.host import Array, array_from, array_of, call_host, compressors, native, torch_of
from spark_elastic.tensorflow.operations import size_op

Gradient = Any
"""A tf.Tensor or tf.IndexedSlices; None for a variable without a gradient."""


class GradientReducer:
    """Averages (or sums) the gradients of a step over the members.

    The world is looked up when the step runs, so a graph is traced once and stays valid when the world changes. The
    arguments are those of `DistributedGradientTape`; `predivide` is its `gradient_predivide_factor`. Raises UsageError
    if they contradict each other.
    """

    def __init__(
        self,
        *,
        op: ReduceOp = Average,
        compression: type[Compressor] = Compression.none,
        predivide: float = 1.0,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._op = op
        self._in_graph, on_host = compressors(compression)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._fused = FusedReduction(op=op, compression=on_host, predivide=predivide, process_set=process_set)

    def __call__(
        self, grads: Sequence[Gradient], scalars: tf.Tensor | None = None, variables: Sequence[Any] = ()
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return the reduced gradients, in the same order, and the sums of `scalars`, a vector of a few numbers.

        Gradients have the same classes, types and shapes on every member; sums are exact for counts up to 2**24;
        `variables` are compared with those of the other members once. Raises MismatchError if gradients or variables
        differ, and HorovodInternalError if a peer is gone (nothing was changed). In a tf.function, TensorFlow raises an
        error of its own class instead: see `host.lost_peers_translated`.
        """
        if self._sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        dense = [at for at, grad in enumerate(grads) if grad is not None and not isinstance(grad, tf.IndexedSlices)]
        sparse = [at for at, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
        packed = [self._in_graph.compress(grads[at]) for at in dense]
        inputs = [tensor for tensor, _ in packed]
        shapes: list[Any] = [tensor.shape for tensor in inputs]
        for at in sparse:
            inputs += [grads[at].values, grads[at].indices]
            shapes += [[None, *grads[at].values.shape[1:]], [None]]
        if scalars is not None:
            inputs.append(scalars)
            shapes.append(scalars.shape)
        if not inputs:
            return list(grads), scalars

        with_sums = scalars is not None
        comparison = VariableComparison(lambda: _named(variables), _values) if variables else None

        def on_host(*arrays: Array) -> list[Array]:
            tensors = [torch_of(array) for array in arrays]
            sums = tensors[-1].to(torch.float64, copy=True) if with_sums else None
            reduced = self._fused(tensors[: len(dense)], sums, comparison)
            # a world of one returns its input; TensorFlow may write into returned memory, so it gets a copy
            pairs = zip(tensors, reduced, strict=False)
            out = [array_from(result.clone() if result is tensor else result) for tensor, result in pairs]
            for at in range(len(dense), len(dense) + 2 * len(sparse), 2):
                # entries with equal indices are summed when they are applied
                values, indices = tensors[at : at + 2]
                if self._op is Average:
                    mode = "trunc" if not values.dtype.is_floating_point else None
                    values = torch.div(values, self._process_set.size(), rounding_mode=mode)
                parts = [operations.allgather_async(each, process_set=self._process_set) for each in (values, indices)]
                out += [array_from(handle.wait()) for handle in parts]
            return out if sums is None else [*out, sums.numpy().astype(arrays[-1].dtype, copy=False)]

        returned = call_host(on_host, inputs, [tensor.dtype for tensor in inputs], shapes)
        out = list(grads)
        for at, tensor, (_, context) in zip(dense, returned, packed, strict=False):
            out[at] = self._in_graph.decompress(tensor, context)
        for number, at in enumerate(sparse):
            values, indices = returned[len(dense) + 2 * number : len(dense) + 2 * number + 2]
            out[at] = tf.IndexedSlices(values, indices, grads[at].dense_shape)
        return out, None if scalars is None else returned[-1]


class _ReducingTape:
    """A gradient tape whose `gradient` returns reduced gradients; everything else is passed to the plain tape."""

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
        reduced, _ = self._reducer([flat[at] for at in shared], variables=[wanted[at] for at in shared])
        for at, grad in zip(shared, reduced, strict=True):
            flat[at] = grad
        if self._scale_local and len(shared) < len(flat):
            size = tf.cast(size_op(self._process_set), tf.float64)
            for at in set(range(len(flat))) - set(shared):
                flat[at] = scaled(flat[at], 1.0 / size)
        return tf.nest.pack_sequence_as(nested, flat, expand_composites=False)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return two lists of (source, gradient) pairs: those of local sources, and those of the others, reduced."""
        wanted = tf.nest.flatten(sources)
        pairs = list(zip(wanted, self.gradient(target, wanted, output_gradients, **kwargs), strict=True))
        local = [pair for pair in pairs if _key(pair[0]) in self._local]
        return local, [pair for pair in pairs if _key(pair[0]) not in self._local]


def scaled(grad: Gradient, factor: Any) -> Gradient:
    """Multiply a gradient, which may be None; do nothing if the factor is None."""
    if grad is None or factor is None:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _named(sources: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the variables among the sources, with their names."""
    variables = [source for source in sources if hasattr(source, "trainable")]
    return [(str(getattr(each, "path", None) or each.name), native(each)) for each in variables]


def _values(variable: Any) -> torch.Tensor:
    with tf.init_scope():
        return torch_of(array_of(variable))


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
    how: dict[str, Any] = {"op": op, "predivide": gradient_predivide_factor, "process_set": process_set}
    reducer = GradientReducer(**how, compression=compression, sparse_as_dense=sparse_as_dense)
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

    Each worker trains the variables of `local_layers`, one layer or several, by itself. With `scale_local_gradients`
    their gradients are divided by the size. The other arguments are those of `DistributedGradientTape`.
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
