"""Reduce the gradients of a step, eagerly or inside a `tf.function`, with one call of Python from the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from spark_elastic.collective import operations
from spark_elastic.collective.fused import FusedReduction
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp
from spark_elastic.errors import HorovodInternalError
from spark_elastic.tensorflow.compression import Compression, Compressor, graph_compressor, host_compressor
from spark_elastic.tensorflow.host import call_host
from spark_elastic.tensorflow.tensors import ALIGN_BYTES, Array, array_from, torch_of

Gradient = Any
"""A tf.Tensor or tf.IndexedSlices; None for a variable without a gradient."""


class GradientReducer:
    """Averages (or sums) the gradients of a step over the members.

    The world is looked up when the step runs, so a graph is traced once and stays valid when the world changes.

    Args:
        op: Average or Sum.
        compression: the compressor of the sent gradients.
        predivide: divisor of gradients before the sum; sums are divided by size / predivide. Needs Average.
        sparse_as_dense: reduce IndexedSlices as dense tensors instead of gathering them.
        process_set: the processes to reduce over.

    Raises:
        UsageError: the arguments contradict each other.
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
        self._in_graph = graph_compressor(compression)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._fused = FusedReduction(
            op=op,
            compression=host_compressor(compression),
            predivide=predivide,
            process_set=process_set,
            align=ALIGN_BYTES,
        )

    @property
    def reductions(self) -> int:
        """The number of reductions that this process has completed."""
        return self._fused.completed

    def __call__(
        self, grads: Sequence[Gradient], scalars: tf.Tensor | None = None
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return the reduced gradients, in the same order, and the sums of `scalars`.

        Args:
            grads: with the same classes, types and shapes on every member.
            scalars: a vector of a few numbers to sum in the same message; exact for counts up to 2**24.

        Raises:
            HorovodInternalError: a peer is gone; nothing was changed. Inside a tf.function, TensorFlow raises an error
                of its own class instead, see `host.translated`.
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

        def on_host(*arrays: Array) -> list[Array]:
            try:
                return self._on_host(arrays, len(dense), len(sparse))
            except HorovodInternalError as error:
                error.in_reduction = True  # in the gathering of sparse ones, too
                raise

        returned = call_host(on_host, inputs, [tensor.dtype for tensor in inputs], shapes)
        out = list(grads)
        for at, tensor, (_, context) in zip(dense, returned, packed, strict=False):
            out[at] = self._in_graph.decompress(tensor, context)
        for number, at in enumerate(sparse):
            values, indices = returned[len(dense) + 2 * number : len(dense) + 2 * number + 2]
            out[at] = tf.IndexedSlices(values, indices, grads[at].dense_shape)
        return out, None if scalars is None else returned[-1]

    def _on_host(self, arrays: Sequence[Array], dense: int, sparse: int) -> list[Array]:
        tensors = [torch_of(array) for array in arrays]
        scalars = tensors[-1].to(torch.float64, copy=True) if len(tensors) > dense + 2 * sparse else None
        reduced = self._fused(tensors[:dense], scalars)
        # a world of one returns its input; TensorFlow may write into returned memory, so it gets a copy
        out = [
            array_from(result.clone() if result is tensor else result)
            for tensor, result in zip(tensors, reduced, strict=False)
        ]
        for at in range(dense, dense + 2 * sparse, 2):
            out += self._gather_slices(tensors[at], tensors[at + 1])
        if scalars is not None:
            out.append(scalars.numpy().astype(arrays[-1].dtype, copy=False))
        return out

    def _gather_slices(self, values: torch.Tensor, indices: torch.Tensor) -> list[Array]:
        """Concatenate the members' entries; entries with equal indices are summed when they are applied."""
        if self._op is Average:
            is_integer = not values.dtype.is_floating_point
            values = torch.div(values, self._process_set.size(), rounding_mode="trunc" if is_integer else None)
        each = [operations.allgather_async(part, process_set=self._process_set) for part in (values, indices)]
        return [array_from(handle.wait()) for handle in each]
