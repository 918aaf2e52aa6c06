"""Reductions for training steps: of all gradients of a step at once, and of the statistics of batch normalisation.

`FusedReduction` is for frameworks that return the gradients of a step together. Torch computes one after the other, see
`torch.gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from spark_elastic.collective.buckets import Bucket, partition
from spark_elastic.collective.calls import agree
from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, Compression, Compressor, ReduceOp, Sum, check_gradient_op
from spark_elastic.errors import HorovodInternalError

# --- sums over the rows of all members within a pass, for synchronised batch normalisation ---------------

_excluded = False


@contextmanager
def without_rows() -> Iterator[None]:
    """Let the passes in this context take part in the others' statistics without adding rows to them.

    A rank that has no rows of a batch uses it: it calls the model on a substitute row, to take part in as many
    collectives as the others.
    """
    global _excluded
    before, _excluded = _excluded, True
    try:
        yield
    finally:
        _excluded = before


def excluded() -> bool:
    """Return True if the rows of this process do not count now, see `without_rows`."""
    return _excluded


def group_of(process_set: ProcessSet) -> GlooGroup | None:
    """Return the group whose rows are normalised together; None if this process is alone or in no world."""
    if process.position is None or process.provisional:
        return None
    return process_set.group()


def add_up(group: GlooGroup, numbers: torch.Tensor) -> torch.Tensor:
    """Sum `numbers`, float64, over the members, in place, and return them.

    Raises:
        HorovodInternalError: a peer is gone. It is marked like a failed reduction of gradients: the step of this pass
            has not changed any parameter.
    """
    try:
        group.wait(group.allreduce(numbers, Sum.gloo))
    except HorovodInternalError as error:
        error.in_reduction = True
        raise
    return numbers


# --- the gradients of a step --------------------------------------------------------------------------

_KEPT = 4
"""The number of bucket sets kept for later steps. Two alternate if results are released one step later."""

on_reduction: list[Callable[[], None]] = []
"""Functions to call when a step's gradients are computed, before they are sent; loops count their steps with it."""


class FusedReduction:
    """Averages or sums the tensors of a step over the members; each step must have the same shapes.

    The results are in buckets that are reused once nobody refers to one of them. The members' agreement on a coming
    world is sent with them.

    Args:
        op: Average or Sum.
        compression: the compressor of the sent values.
        predivide: divisor before the sum; after it, sums are divided by size / predivide. Needs Average.
        process_set: the processes to reduce over.
        align: results begin at a multiple of this many bytes.

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
        align: int = 1,
    ) -> None:
        check_gradient_op(op, predivide)
        self.completed = 0
        """The number of completed reductions."""
        self._op = op
        self._compression = compression
        self._predivide = predivide
        self._process_set = process_set
        self._align = align
        self._kinds: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._piggyback_width = 0
        self._agreed_on: GlooGroup | None = None
        """The group whose members were found to have the same plan."""
        self._sets: list[list[Bucket]] = []
        self._parts: list[list[int]] = []

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return the reduced tensors, in the same order; in a world of one, `tensors` themselves.

        Args:
            tensors: dense and contiguous tensors on the CPU, with the same shapes and types on every member. They are
                not changed.
            scalars: float64 numbers to sum too, in place; exact for counts up to 2**24.

        Raises:
            HorovodInternalError: a peer is gone. Nothing was changed.
        """
        for begins in on_reduction:
            begins()
        try:
            group = self._process_set.group() if self._process_set.included() else None
            if group is None:
                if self._process_set is global_process_set:
                    process.saw_update(process.update_pending)
                results = list(tensors)
            else:
                results = self._reduce(group, tensors, scalars)
        except HorovodInternalError as error:
            self._sets = []  # what is in flight keeps its own
            error.in_reduction = True
            raise
        self.completed += 1
        return results

    def _reduce(
        self, group: GlooGroup, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None
    ) -> list[torch.Tensor]:
        self._plan(tensors, scalars)
        if group is not self._agreed_on:
            self._agree(group)
        buckets = self._free_buckets(tensors)
        works = []
        for bucket, part in zip(buckets, self._parts, strict=True):
            if bucket.flag is not None:
                bucket.flag.fill_(process.update_pending)
            if bucket.piggyback is not None and scalars is not None:
                bucket.piggyback.copy_(scalars)
            bucket.scale(self._op, self._predivide, group.size)
            works.append(bucket.send(group, Sum.gloo, [tensors[index] for index in part]))
        with_piggyback = bool(buckets) and buckets[-1].piggyback is not None
        alone = group.allreduce(scalars, Sum.gloo) if scalars is not None and not with_piggyback else None
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
        elif scalars is not None:
            piggyback = buckets[-1].piggyback
            assert piggyback is not None
            scalars.copy_(piggyback / buckets[-1].after)
        if buckets:
            assert buckets[-1].flag is not None
            if self._process_set is global_process_set:
                process.saw_update(bool(buckets[-1].flag.item()))
        return results

    def _plan(self, tensors: Sequence[torch.Tensor], scalars: torch.Tensor | None) -> None:
        """Divide the tensors into buckets, unless their shapes are those of the step before."""
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        width = 0 if scalars is None else scalars.numel()
        if kinds == self._kinds and width == self._piggyback_width:
            return
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        parts = [[places[id(tensor)] for tensor in part] for part in partition(list(tensors), None)]
        # the flag and the numbers are in the last bucket, which has the most precise type
        parts.sort(key=lambda part: torch.finfo(tensors[part[0]].dtype).bits)
        self._kinds, self._piggyback_width, self._parts, self._sets = kinds, width, parts, []
        self._agreed_on = None

    def _agree(self, group: GlooGroup) -> None:
        """Compare the plan with those of the other members.

        Raises:
            MismatchError: they differ.
        """
        shapes = "; ".join(f"{dtype} {list(shape)}" for shape, dtype in self._kinds)
        settings = f"op={self._op.name}, predivide={self._predivide}, compression={self._compression.__name__}"
        agree(group, "reduction of gradients", f"{settings}, {self._piggyback_width} numbers: {shapes}")
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
                flagged=number == last,
                piggyback=self._piggyback_width if number == last else 0,
                align=self._align,
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
