"""Reductions of the gradients of a training step, in buckets.

`FusedReduction` is for frameworks that return the gradients of a step together. Torch computes one after the other and
fills the buckets in `torch.gradients`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from spark_elastic.collective.calls import agree
from spark_elastic.collective.group import Group
from spark_elastic.collective.operators import (
    Average,
    CastCompressor,
    Compression,
    Compressor,
    Max,
    NoneCompressor,
    ReduceOp,
    Sum,
    check_gradient_op,
    scaling_factors,
)
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduce import BUCKET_BYTES, FIRST_BUCKET_BYTES
from spark_elastic.collective.replicas import VariableComparison
from spark_elastic.errors import HorovodInternalError


class Bucket:
    """Gradients of one type that are reduced together.

    Args:
        params: tensors of one type and device; only their shapes are used.
        compression: the compressor of the sent values.
        flags, piggyback: the numbers of elements of these attributes.
        align: each view begins at a multiple of this many bytes.

    Attributes:
        flat: the buffer, for the gradients, then the piggyback numbers, then `given`, then `flags`.
        views: the gradients in `flat`, shaped like their parameters.
        piggyback: float64 or float32 numbers that are reduced with the gradients; None without such numbers, or if the
            sent type would round them.
        given: an element of `flat` for each gradient: the number of members that gave one, or what rounding leaves of
            that number, which is never 0.
        flags: the last elements of `flat`, which are summed without scaling; None if the bucket has none. The first
            element is 1 on a member to which the driver has announced a coming world.
        received: copies on the CPU of what `receive` has found in `piggyback`, in `given` and in `flags`.
        after: the factor to multiply `flat` by after the sum.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        compression: type[Compressor],
        flags: int,
        piggyback: int = 0,
        align: int = 1,
    ) -> None:
        self.params = list(params)
        self.compression = compression
        self.ready = 0
        """The number of gradients that backward has computed; counted by `torch.gradients`."""
        self.uses = 0
        """The number of tensors that use the memory of a free bucket."""
        first = self.params[0]
        unit = max(1, align // first.element_size())
        sizes = [-(-param.numel() // unit) * unit for param in params]
        if compression is not NoneCompressor or first.dtype not in (torch.float32, torch.float64):
            piggyback = 0
        count = sum(sizes) + piggyback + len(sizes) + flags
        self.flat = torch.zeros(count, dtype=first.dtype, device=first.device)
        *pieces, numbers, self.given, rest = self.flat.split([*sizes, piggyback, len(sizes), flags])
        self.piggyback = numbers if piggyback else None
        self.flags = rest if flags else None
        self._tail = self.flat[sum(sizes) :]
        self._host = torch.empty_like(self._tail, device="cpu", pin_memory=first.is_cuda)
        self.received = self._host.split([piggyback, len(sizes), flags])
        self.views = [shaped(piece[: param.numel()], param) for piece, param in zip(pieces, params, strict=True)]
        self._starts = [0, *accumulate(sizes)]
        """The index in `flat` at which each gradient begins, and the index behind the last one."""
        self._sources: list[torch.Tensor | None] = []
        self._missing: list[int] = []
        """The indices of the gradients that this member did not give."""
        self._before = 1.0
        self.after = 1.0
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        self._sent_shape = torch.Size()

    def scale(self, op: ReduceOp, predivide: float, size: int) -> None:
        """Set the factors to multiply gradients by before and after the sum."""
        cast = issubclass(self.compression, CastCompressor) and self.flat.dtype.is_floating_point
        wire = self.compression.dtype if cast else self.flat.dtype  # type: ignore[attr-defined]
        self._before, self.after = scaling_factors(op, predivide, size, wire)

    def send(self, group: Group, op: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        """Launch the reduction of the scaled gradients; `flags` and `piggyback` are sent with their present values.

        Rounding and a user's compressor are applied to the gradients alone. These are in the order of `params` and
        shaped like them; None: this member has none. They may be the views, and are no longer needed afterwards.

        Returns:
            The work. After waiting for it, call `receive`, or `unpack` for `flat` alone.
        """
        self._sources = [
            None if gradient is None else flattened(gradient, view)
            for gradient, view in zip(gradients, self.views, strict=True)
        ]
        self._missing = [at for at, source in enumerate(self._sources) if source is None]
        self.given.fill_(1)
        for at in self._missing:
            self.given[at] = 0
        try:
            if self.compression is NoneCompressor:
                return group.allreduce(self.flat, op, self._fill)
            self._fill(self.flat, 0)
            return group.allreduce(self._compressed(), op)
        finally:
            self._sources = []

    def _fill(self, out: torch.Tensor, start: int) -> None:
        """Write the values to send, beginning with the element at `start` of `flat`, into `out`, shape (elements,)."""
        end = start + out.numel()
        gradients_end = self._starts[-1]
        number = bisect_right(self._starts, start) - 1
        while number < len(self._sources) and self._starts[number] < end:
            source, begin = self._sources[number], self._starts[number]
            size = self.params[number].numel()
            first, last = max(begin, start), min(begin + size, end)
            number += 1
            if first >= last:
                continue
            part = out[first - start : last - start]
            if source is None:
                part.zero_()
                continue
            if last - first < size:
                source = source[first - begin : last - begin]
            torch.mul(source, self._before, out=part)
        if end > gradients_end and out is not self.flat:
            first = max(start, gradients_end)
            out[first - start :].copy_(self.flat[first:end])

    def _compressed(self) -> torch.Tensor:
        if issubclass(self.compression, CastCompressor):
            if self._wire is None:
                self._wire = torch.empty_like(self.flat, dtype=self.compression.dtype)
            return self._wire.copy_(self.flat)
        end = self._starts[-1]
        sent, self._context = self.compression.compress(self.flat[:end])
        self._sent_shape = sent.shape
        self._wire = torch.cat([sent.reshape(-1), self.flat[end:].to(sent)])
        return self._wire

    def unpack(self) -> None:
        """Decompress the received values into `flat`."""
        if self._wire is None:
            return
        if issubclass(self.compression, CastCompressor):
            self.flat.copy_(self._wire)
            return
        end = self._starts[-1]
        received, rest = self._wire.split([self._sent_shape.numel(), self.flat.numel() - end])
        self.flat[:end].copy_(self.compression.decompress(received.view(self._sent_shape), self._context))
        self.flat[end:].copy_(rest)

    def receive(self, queued: bool) -> None:
        """Decompress and scale the received values; copy to `received` those that the host reads.

        `queued`: only put that on the stream of the GPU; the caller waits for it. Not with a user's compressor.
        """
        self.unpack()
        self._host.copy_(self._tail, non_blocking=queued)
        if self.after != 1.0:
            self.flat.mul_(self.after)

    def given_by_none(self) -> list[int]:
        """Return the indices of the gradients that no member gave; call it after `receive`."""
        if not self._missing:
            return []
        counts = self.received[1].tolist()
        return [at for at in self._missing if not counts[at]]


def shaped(piece: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the piece with the parameter's shape and memory layout, with which optimizers are fastest."""
    # A tensor like this one keeps its strides only if these leave no gap and no overlap.
    if param.is_contiguous() or torch.empty_like(param, device="meta").stride() != param.stride():
        return piece.view(param.shape)
    return piece.as_strided(param.shape, param.stride())


def flattened(gradient: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the elements, shape (elements,), in the memory order of the view; copy only if the orders differ."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_contiguous() and view.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() != view.stride():
        gradient = torch.empty_like(view).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def partition(
    params: Sequence[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets.

    Args:
        params: the parameters, in the order of their registration.
        groups: the number of about equal buckets; or lists of parameters that share a bucket, where the parameters in
            none of them are divided by size; or None to fill buckets up to their size, last layer first.

    Returns:
        Lists of parameters of one type and device each, in the order in which they are reduced.
    """
    if groups is None:
        return _by_size(list(reversed(params)))
    if isinstance(groups, int):
        ordered = list(reversed(params))
        quotient, rest = divmod(len(ordered), groups)
        cuts = [i * quotient + min(i, rest) for i in range(groups + 1)]
        chosen = [ordered[a:b] for a, b in pairwise(cuts) if b > a]
    else:
        known = {id(param) for param in params}
        chosen = [[param for param in group if id(param) in known] for group in groups]
        named = {id(param) for group in chosen for param in group}
        chosen += _by_size([param for param in reversed(params) if id(param) not in named])
    return [part for group in chosen for part in _by_kind(group)]


def _by_kind(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())


def _by_size(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    out: list[list[torch.Tensor]] = []
    for kind in _by_kind(params):
        filled = float("inf")
        for param in kind:
            if filled >= (BUCKET_BYTES if len(out) > 1 else FIRST_BUCKET_BYTES):
                out.append([])
                filled = 0
            out[-1].append(param)
            filled += param.numel() * param.element_size()
    return out


# --- the gradients of a step --------------------------------------------------------------------------

ALIGN_BYTES = 64
"""TensorFlow reads arrays without a copy if they begin at a multiple of this."""
_KEPT = 4
"""The number of bucket sets kept for later steps. Two alternate if results are released one step later."""


class FusedReduction:
    """Averages or sums the tensors of a step over the members; each step must have the same shapes.

    The results begin at multiples of `ALIGN_BYTES`. They are in buckets that are reused once no tensor refers to one
    of them. The members' agreement on a coming world is sent with them.

    Args:
        op: Average or Sum.
        compression: the compressor of the sent values.
        predivide: divisor before the sum; after it, sums are divided by size / predivide. Needs Average.
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
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_gradient_op(op, predivide)
        self._op = op
        self._compression = compression
        self._predivide = predivide
        self._process_set = process_set
        self._kinds: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._piggyback_width = 0
        self._agreed_on: Group | None = None
        """The group whose members were found to have the same plan."""
        self._comparison: VariableComparison | None = None
        """Compares the parameters before the next step in this group; None: they are equal."""
        self._left = 0
        self._sets: list[list[Bucket]] = []
        self._parts: list[list[int]] = []

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: torch.Tensor | None = None,
        comparison: VariableComparison | None = None,
    ) -> list[torch.Tensor]:
        """Return the reduced tensors, in the same order; in a world of one, `tensors` themselves.

        Args:
            tensors: dense and contiguous tensors on the CPU, with the same shapes and types on every member. They are
                not changed.
            scalars: float64 numbers to sum too, in place; exact for counts up to 2**24.
            comparison: the comparison of the parameters, on every member or on none.

        Raises:
            HorovodInternalError: a peer is gone. Nothing was changed.
            MismatchError: the members have other tensors, or other parameters.
        """
        try:
            group = self._process_set.group() if self._process_set.included() else None
            if group is not None:
                return self._reduce(group, tensors, scalars, comparison)
        except HorovodInternalError:
            self._sets = []  # what is in flight keeps its own
            raise
        if self._process_set is global_process_set:
            process.saw_update(process.update_pending)
        return list(tensors)

    def _reduce(
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        scalars: torch.Tensor | None,
        comparison: VariableComparison | None,
    ) -> list[torch.Tensor]:
        self._plan(tensors, scalars)
        if group is not self._agreed_on:
            self._agree(group, comparison)
        if self._comparison is not None:
            self._left = self._comparison.compare(group, self._left)
            if not self._left:
                self._comparison = None
        buckets = self._free_buckets(tensors)
        works = []
        for bucket, part in zip(buckets, self._parts, strict=True):
            if bucket.flags is not None:
                bucket.flags.fill_(process.update_pending)
            if bucket.piggyback is not None and scalars is not None:
                bucket.piggyback.copy_(scalars)
            bucket.scale(self._op, self._predivide, group.size)
            works.append(bucket.send(group, Sum.gloo, [tensors[index] for index in part]))
        piggyback = buckets[-1].piggyback if buckets else None
        alone = group.allreduce(scalars, Sum.gloo) if scalars is not None and piggyback is None else None
        results = list(tensors)
        for bucket, part, work in zip(buckets, self._parts, works, strict=True):
            group.wait(work)
            bucket.unpack()
            if bucket.after != 1.0:
                bucket.flat.mul_(bucket.after)
            for index, view in zip(part, bucket.views, strict=True):
                results[index] = view.detach()  # counted as a use of the memory for as long as it exists
        if alone is not None:
            group.wait(alone)
        elif scalars is not None and piggyback is not None:
            scalars.copy_(piggyback / buckets[-1].after)
        if buckets and self._process_set is global_process_set:
            assert buckets[-1].flags is not None
            process.saw_update(bool(buckets[-1].flags.item()))
        return results

    def _plan(self, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None) -> None:
        """Divide the tensors into buckets, unless they have the same shapes as in the step before."""
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        # compressed buckets carry no numbers, which are then reduced on their own
        width = scalars.numel() if scalars is not None and self._compression is NoneCompressor else 0
        if kinds == self._kinds and width == self._piggyback_width:
            return
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        parts = [[index_of[id(tensor)] for tensor in part] for part in partition(list(tensors), None)]
        # the flag and the numbers are in the last bucket, which has the most precise type
        parts.sort(key=lambda part: torch.finfo(tensors[part[0]].dtype).bits)
        self._kinds, self._piggyback_width, self._parts = kinds, width, parts
        self._sets = []
        self._agreed_on = None

    def _agree(self, group: Group, comparison: VariableComparison | None) -> None:
        """Compare the plan with those of the other members, and find out whether to compare the parameters."""
        shapes = "; ".join(f"{dtype} {list(shape)}" for shape, dtype in self._kinds)
        settings = f"op={self._op.name}, predivide={self._predivide}, compression={self._compression.__name__}"
        left = 0 if comparison is None else comparison.left
        plan = f"{settings}, {self._piggyback_width} numbers: {shapes}"
        if not agree(group, "reduction of gradients", plan, detail=str(left)):
            most = torch.tensor([left], device="cpu")
            group.wait(group.allreduce(most, Max.gloo))
            left = int(most)
        self._comparison, self._left = comparison if left else None, left
        self._agreed_on = group

    def _free_buckets(self, tensors: Sequence[torch.Tensor]) -> list[Bucket]:
        for buckets in self._sets:
            if all(_uses(bucket) == bucket.uses for bucket in buckets):
                return buckets
        last = len(self._parts) - 1
        buckets = [
            Bucket(
                [tensors[index] for index in part],
                self._compression,
                flags=int(number == last),
                piggyback=self._piggyback_width if number == last else 0,
                align=ALIGN_BYTES,
            )
            for number, part in enumerate(self._parts)
        ]
        for bucket in buckets:
            bucket.uses = _uses(bucket)
        if len(self._sets) < _KEPT:
            self._sets.append(buckets)
        return buckets


def _uses(bucket: Bucket) -> int:
    """Return the number of tensors that use the memory of this bucket, numpy arrays of them included."""
    storage = bucket.flat.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # private, there since torch 2.1
