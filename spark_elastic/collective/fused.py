"""One step's gradients, all there at once, added up over the members in few large messages.

For frameworks that hand over their gradients together. Torch hands over one at a time, see `torch.gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from spark_elastic.collective.buckets import Bucket, partition
from spark_elastic.collective.compression import Compression, Compressor
from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.operations import agree
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp, Sum, check_of_gradients
from spark_elastic.errors import HorovodInternalError

# Sums over the rows of all members within a forward or backward pass: what synchronised batch normalisation needs.

_excluded = False


@contextmanager
def without_rows() -> Iterator[None]:
    """While this lasts, passes of this process take part in the others' statistics without adding to them.

    For a rank that has no rows of a batch: it calls the model on a row that stands in, so that it takes part in as many
    collectives as the others.
    """
    global _excluded
    before, _excluded = _excluded, True
    try:
        yield
    finally:
        _excluded = before


def excluded() -> bool:
    """Whether rows of this process do not count now, see `without_rows`."""
    return _excluded


def group_of(process_set: ProcessSet) -> GlooGroup | None:
    """Return the group whose rows count together; None: this process is alone, or its world is not known yet."""
    if process.position is None or process.provisional:
        return None
    return process_set.group()


def add_up(group: GlooGroup, numbers: torch.Tensor) -> torch.Tensor:
    """Add up `numbers`, float64, over the members, in place.

    Raises:
        HorovodInternalError: a peer is gone. It counts as a failed reduction of gradients: the step that this pass
            belongs to has not changed any parameter.
    """
    try:
        group.wait(group.allreduce(numbers, Sum.gloo))
    except HorovodInternalError as error:
        error.in_reduction = True
        raise
    return numbers


_KEPT = 4
"""Sets of buckets kept for later steps. Two are in turns where results are let go of a step later."""

on_reduction: list[Callable[[], None]] = []
"""Called when the gradients of a step are there, before they are sent: by loops that want to know of their steps."""


class FusedReduction:
    """Averages (or sums) lists of tensors of always the same shapes over the members.

    The results lie in buckets that are used again once nobody holds one of them any more. The hosts-updated agreement
    rides along.

    Args:
        op: Average or Sum.
        predivide: tensors are divided by this before the sum, and by size / predivide after it. Needs Average.
        align: results begin at a multiple of so many bytes.

    Raises: UsageError: arguments that contradict each other.
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
        check_of_gradients(op, predivide)
        self.completed = 0
        """Reductions so far."""
        self._op = op
        self._compression = compression
        self._predivide = predivide
        self._process_set = process_set
        self._align = align
        self._kinds: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._cargo_width = 0
        self._agreed_on: GlooGroup | None = None
        """The group whose members were found to have the same plan."""
        self._sets: list[list[Bucket]] = []
        self._parts: list[list[int]] = []

    def __call__(self, tensors: Sequence[torch.Tensor], carried: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The reduced tensors, in the order given; `tensors` themselves in a world of one.

        Args:
            tensors: dense, on the CPU, contiguous; not changed. Of the same shapes and types on every member.
            carried: float64 numbers to add up too, in place: exact for counts up to 2**24.

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
                results = self._reduce(group, tensors, carried)
        except HorovodInternalError as error:
            self._sets = []  # what is in flight keeps its own
            error.in_reduction = True
            raise
        self.completed += 1
        return results

    def _reduce(
        self, group: GlooGroup, tensors: Sequence[torch.Tensor], carried: torch.Tensor | None
    ) -> list[torch.Tensor]:
        self._plan(tensors, carried)
        if group is not self._agreed_on:
            self._agree(group)
        buckets = self._free_buckets(tensors)
        works = []
        for bucket, part in zip(buckets, self._parts, strict=True):
            if bucket.flag is not None:
                bucket.flag.fill_(process.update_pending)
            if bucket.cargo is not None and carried is not None:
                bucket.cargo.copy_(carried)
            bucket.scale(self._op, self._predivide, group.size)
            works.append(bucket.send(group, Sum.gloo, [tensors[index] for index in part]))
        with_cargo = bool(buckets) and buckets[-1].cargo is not None
        alone = group.allreduce(carried, Sum.gloo) if carried is not None and not with_cargo else None
        results = list(tensors)
        for bucket, part, work in zip(buckets, self._parts, works, strict=True):
            group.wait(work)
            bucket.unpack()
            if bucket.after != 1.0:
                bucket.flat.mul_(bucket.after)
            for index, view in zip(part, bucket.views, strict=True):
                results[index] = view.detach()  # one more use of the memory, as long as anybody has it
        if alone is not None:
            group.wait(alone)
        elif carried is not None:
            cargo = buckets[-1].cargo
            assert cargo is not None
            carried.copy_(cargo / buckets[-1].after)
        if buckets:
            assert buckets[-1].flag is not None
            if self._process_set is global_process_set:
                process.saw_update(bool(buckets[-1].flag.item()))
        return results

    def _plan(self, tensors: Sequence[torch.Tensor], carried: torch.Tensor | None) -> None:
        """Which tensors share a bucket."""
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        width = 0 if carried is None else carried.numel()
        if kinds == self._kinds and width == self._cargo_width:
            return
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        parts = [[places[id(tensor)] for tensor in part] for part in partition(list(tensors), None)]
        # the flag and the numbers travel in the last one, where they are rounded least
        parts.sort(key=lambda part: torch.finfo(tensors[part[0]].dtype).bits)
        self._kinds, self._cargo_width, self._parts, self._sets = kinds, width, parts, []
        self._agreed_on = None

    def _agree(self, group: GlooGroup) -> None:
        """Compare the plan with the other members'. Raises: MismatchError."""
        shapes = "; ".join(f"{dtype} {list(shape)}" for shape, dtype in self._kinds)
        settings = f"op={self._op.name}, predivide={self._predivide}, compression={self._compression.__name__}"
        agree(group, "reduction of gradients", f"{settings}, {self._cargo_width} numbers: {shapes}")
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
                cargo=self._cargo_width if number == last else 0,
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
    """Tensors that lie in the memory of this bucket; numpy arrays of them are counted, too."""
    storage = bucket.flat.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # private, there since torch 2.1
