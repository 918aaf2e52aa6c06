"""Sums over the shards of a batch whose bits do not depend on which member has computed which shard.

A batch is cut into a fixed number of shards. Their values are summed in a binary tree over the shards, which is the
same for any number of members. A member sums the complete subtrees of its own shards (`PartialSums`); the members then
exchange these partial sums and add them up in the order of the tree (`ShardReduction`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from spark_elastic.collective.calls import agree
from spark_elastic.collective.fused import flattened, shaped
from spark_elastic.collective.group import Group, as_bytes
from spark_elastic.collective.operators import Sum
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import global_process_set
from spark_elastic.data.order.shares import Shares, part_of
from spark_elastic.errors import HorovodInternalError, OutsideLoopError

ALIGNMENT_BYTES = 64
"""Results begin at a multiple of this: kernels may compute other bits of a tensor that begins elsewhere."""

Node = tuple[int, int]
"""A node of the tree: the shards `[first, last)` below it."""

# --- the tree -----------------------------------------------------------------------------------------


def shards_of(rank: int, size: int, count: int, shares: Shares = None) -> range:
    """Return the shards that a member computes, a contiguous range; `shares`: how many each member does."""
    first, last, whole = part_of(rank, size, shares)
    return range(count * first // whole, count * last // whole)


def rows_of(shard: int, count: int, rows: int) -> tuple[int, int]:
    """Return where a shard begins and ends in a batch of so many rows; some are empty if there are fewer rows."""
    return rows * shard // count, rows * (shard + 1) // count


def children(node: Node) -> tuple[Node, Node]:
    first, last = node
    middle = first + (last - first) // 2
    return (first, middle), (middle, last)


@functools.lru_cache(maxsize=64)
def partials_of(count: int, size: int, shares: tuple[int, ...] | None = None) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes of each member's partial sums, in rank order: the largest that have its shards alone."""

    def within(shards: range, node: Node) -> tuple[Node, ...]:
        if shards.start <= node[0] and node[1] <= shards.stop:
            return (node,)
        if node[1] <= shards.start or shards.stop <= node[0]:
            return ()
        left, right = children(node)
        return within(shards, left) + within(shards, right)

    ranges = [shards_of(rank, size, count, shares) for rank in range(size)]
    return tuple(within(shards, (0, count)) if shards else () for shards in ranges)


def sum_below(node: Node, known: Mapping[Node, torch.Tensor]) -> torch.Tensor:
    """Return the sum at a node of the tree, from those of nodes below it, or at it."""
    if node in known:
        return known[node]
    left, right = children(node)
    return sum_below(left, known) + sum_below(right, known)


def tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of a matrix, one for each shard, in the order of the tree."""
    return sum_below((0, len(rows)), {(shard, shard + 1): row for shard, row in enumerate(rows)}) + 0.0


class PartialSums:
    """The sums of one member's shards over their largest subtrees, which are its nodes of `partials_of`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._merges: list[int] = []
        """For each shard, the number of sums that are complete with it."""
        for node in nodes:
            self._merges += _merges(node)
        self._added = 0
        self.values: list[list[torch.Tensor] | None] = []
        """The sums, one list of tensors for each node, to be read; None stands for zeros."""

    def add(self, tensors: list[torch.Tensor] | None) -> None:
        """Add the next shard's tensors, which are changed; None: it is empty."""
        self.values.append(tensors)
        for _ in range(self._merges[self._added]):
            right, left = self.values.pop(), self.values.pop()
            if left and right:
                torch._foreach_add_(left, right)
            self.values.append(right if left is None else left)
        self._added += 1

    def total(self) -> list[torch.Tensor] | None:
        """Return the sum over all shards, which are this member's; a zero in it has no sign, see `_Flat.fill`."""
        (tensors,) = self.values
        if tensors:
            torch._foreach_add_(tensors, 0.0)
        return tensors

    @property
    def complete(self) -> bool:
        return self._added == len(self._merges)


def _merges(node: Node) -> list[int]:
    if node[1] - node[0] == 1:
        return [0]
    left, right = children(node)
    found = _merges(left) + _merges(right)
    found[-1] += 1
    return found


# --- the exchange ---------------------------------------------------------------------------------------


class _Flat(NamedTuple):
    """The tensors of one type in one buffer."""

    places: list[int]
    """The positions of the tensors in the list of all."""
    starts: list[int]
    """The index at which each tensor begins in the buffer."""
    slice_size: int
    """The elements that each member sums; the buffer has as many for each."""
    buffer: torch.Tensor
    views: list[torch.Tensor]

    def fill(self, sources: Sequence[torch.Tensor] | None, out: torch.Tensor, start: int) -> None:
        """Write elements `start`.. of the buffer into `out`; None: zeros. A zero without a sign replaces -0.

        A member without shards adds 0 to a sum, which turns -0 into 0. So no sum may be -0 in any world.
        """
        if sources is None:
            out.zero_()
            return
        end = start + out.numel()
        for source, place in zip(sources, self.starts, strict=True):
            first, last = max(place, start), min(place + source.numel(), end)
            if first < last:
                torch.add(source[first - place : last - place], 0.0, out=out[first - start : last - start])

    def sources(self, tensors: Sequence[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Return the tensors of this buffer, each with its elements in the memory order of the view."""
        if tensors is None:
            return None
        return [flattened(tensors[place].detach(), view) for place, view in zip(self.places, self.views, strict=True)]


def _flats(like: Sequence[torch.Tensor], size: int) -> list[_Flat]:
    kinds: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(like):
        kinds.setdefault(tensor.dtype, []).append(place)
    flats = []
    for dtype, places in kinds.items():
        unit = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        sizes = [-(-like[place].numel() // unit) * unit for place in places]
        *starts, total = [0, *accumulate(sizes)]
        slice_size = -(-total // (size * unit)) * unit
        buffer = torch.zeros(slice_size * size, dtype=dtype)
        tensors = [like[place] for place in places]
        views = [shaped(buffer[at : at + each.numel()], each) for at, each in zip(starts, tensors, strict=True)]
        flats.append(_Flat(places, starts, slice_size, buffer, views))
    return flats


class ShardReduction:
    """Adds up the members' partial sums in the order of the tree; all members get the same bits.

    With two partial sums, one reduction adds them. With more, each member receives a slice of all of them, adds them
    up, and sends its slice of the result to all.

    Args:
        count: The number of shards of each batch.
        about: Settings that must be the same on all members, in words.
        on_new_world: Called once in each new world with other members, before its first exchange.
    """

    def __init__(self, count: int, about: str = "", on_new_world: Callable[[], None] | None = None) -> None:
        self.count = count
        self.shares: tuple[int, ...] | None = None
        """The shards that each member computes, the same on all members; None: about as many."""
        self._about = about
        self._on_new_world = on_new_world
        self._group: Group | None = None
        self._shapes = ""
        self._flats: list[_Flat] = []

    def shards(self) -> range:
        """Return this member's shards in the present world."""
        position = process.require()
        return shards_of(position.rank, position.size, self.count, self.shares)

    def partial_sums(self) -> PartialSums:
        position = process.require()
        return PartialSums(partials_of(self.count, position.size, self.shares)[position.rank])

    def exchange(self, like: Sequence[torch.Tensor], sums: PartialSums, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums over all shards, with the shapes and memory layouts of `like`; they are valid until the next.

        Args:
            like: Tensors on the CPU, with the same shapes and types on every member; only these are used.
            sums: This member's partial sums.
            numbers: A float64 vector, summed over the members in place: each element must be 0 on all members but one,
                or a small whole number.

        Raises:
            HorovodInternalError: A peer is gone. Nothing was changed.
            MismatchError: Settings or shapes differ between the members.
            OutsideLoopError: This process is in no world yet.
        """
        assert sums.complete
        try:
            group = self._agreed_group(like or None)
            if group is not None:
                return self._sum(group, like, sums, numbers)
        except HorovodInternalError:
            self._flats, self._shapes = [], ""  # a transfer may still write to the buffers
            raise
        process.saw_update(process.update_pending)
        numbers.add_(0.0)
        total = sums.total()
        return [torch.zeros_like(tensor) for tensor in like] if total is None else total

    def gather(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a float64 tensor over the members in place, as `numbers` of `exchange`, and return it."""
        numbers.add_(0.0)
        group = self._agreed_group(None)
        if group is not None:
            group.wait(group.allreduce(numbers, Sum.gloo))
        return numbers

    def _agreed_group(self, like: Sequence[torch.Tensor] | None) -> Group | None:
        group = global_process_set.group()
        if group is None:
            self._group = None
            if (size := process.require().size) > 1:
                raise OutsideLoopError(
                    f"this worker has its shards of a batch, and reaches none of the other {size - 1} workers yet; go "
                    "through the shards in the function decorated with hvd.elastic.run, and not in a reset callback"
                )
            return None
        if group is not self._group:
            agree(group, "virtual workers", f"{self.count} shards, {self._about}")
            if self._on_new_world is not None:
                self._on_new_world()
            self._group, self._flats, self._shapes = group, [], ""
        if like is not None:
            shapes = "; ".join(f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())}" for tensor in like)
            if shapes != self._shapes:
                agree(group, "gradients of virtual workers", shapes)
                self._flats, self._shapes = _flats(like, group.size), shapes
        return group

    def _sum(
        self, group: Group, like: Sequence[torch.Tensor], sums: PartialSums, numbers: torch.Tensor
    ) -> list[torch.Tensor]:
        vector = torch.cat([numbers + 0.0, torch.tensor([float(process.update_pending)], dtype=torch.float64)])
        nodes = partials_of(self.count, group.size, self.shares)
        works: list[tuple[Any, Callable[[], Any] | None]] = [(group.allreduce(vector, Sum.gloo), None)]
        for flat in self._flats if like else ():
            if sum(map(len, nodes)) > 2:
                works.append(_launch_slices(group, flat, sums, nodes))
            else:  # the order in which two numbers are added does not matter
                fill = functools.partial(flat.fill, flat.sources(sums.values[0] if sums.values else None))
                works.append((group.allreduce(flat.buffer, Sum.gloo, fill), None))
        for work, then in works:
            group.wait(work)
            if then is not None:
                group.wait(then())
        numbers.copy_(vector[:-1])
        process.saw_update(bool(vector[-1]))
        results: list[torch.Tensor] = list(like)
        for flat in self._flats if like else ():
            for place, view in zip(flat.places, flat.views, strict=True):
                results[place] = view
        return results


def _launch_slices(
    group: Group, flat: _Flat, sums: PartialSums, nodes: Sequence[Sequence[Node]]
) -> tuple[Any, Callable[[], Any]]:
    """Launch the exchange of slices; the function that is returned adds them up and launches the way back."""
    own, size = len(sums.values), flat.slice_size
    sent = flat.buffer.new_empty((group.size, own, size))
    for number, value in enumerate(sums.values):
        sources = flat.sources(value)
        for member in range(group.size):
            flat.fill(sources, sent[member, number], member * size)
    received = sent.new_empty((sum(map(len, nodes)), size))
    row_bytes = size * sent.itemsize
    work = group.alltoall(
        as_bytes(received), as_bytes(sent), [len(each) * row_bytes for each in nodes], [own * row_bytes] * group.size
    )

    def add_up() -> Any:
        known = dict(zip((node for each in nodes for node in each), received, strict=True))
        total = sum_below((0, max(node[1] for node in known)), known)
        return group.allgather(as_bytes(flat.buffer), as_bytes(total.contiguous()))

    return work, add_up
