"""Reductions among the processes of one host, through memory that they share.

A tensor is sent in pieces. A member copies a piece into its own segment and counts it as arrived. Then either

- every member adds up what all have there, in the order of their ranks, straight into its own result: nobody has to be
  waited for but for its own contribution; or
- (large pieces of many members, and several hosts) each owner adds up one slice, reduces it with the owners of the same
  slice on the other hosts, leaves it in its own segment, and everybody reads all slices.

Either way all members get the same bits. A slot of a segment is used again once all members have read it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spark_elastic.collective.shared_memory.segment import ARRIVED, CONSUMED, DEPTH, REDUCED, SMALL_BYTES, TABLE, Room
from spark_elastic.collective.shared_memory.spin_wait import Peer, Waiting
from spark_elastic.errors import UsageError

if TYPE_CHECKING:
    from spark_elastic.collective.gloo import Fill, GlooGroup
    from spark_elastic.collective.shared_memory.peers import Met

# Pieces of a reduction within a host: what they are called in the table, how they are added up and cut into slices.

_KINDS = {
    dtype: number
    for number, dtype in enumerate(
        (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
    )
}
_OPERATORS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "SUM": (0, torch.add),
    "PRODUCT": (1, torch.mul),
    "MIN": (2, torch.minimum),
    "MAX": (3, torch.maximum),
}
_SLICE_ALIGN_BYTES = 64
"""Two members never write to one cache line."""


@dataclass(slots=True)
class Piece:
    """One that this member has launched and not read yet."""

    number: int
    out: torch.Tensor
    """Where the result goes."""
    sent: torch.Tensor
    """What this member sends, in its segment."""
    in_place: bool
    """Whether what was sent lies in `out`, too, until the result does."""
    code: int
    op: Any
    slices: list[slice] | None
    """The elements that each owner adds up for all; None: every member adds up everything for itself."""
    between: Any = None
    """The reduction of this member's slice with the other hosts'."""

    @property
    def combine(self) -> Callable[..., torch.Tensor]:
        return _OPERATORS[_name(self.op)][1]


def reducible(tensor: torch.Tensor, op: Any) -> bool:
    return tensor.dtype in _KINDS and tensor.device.type == "cpu" and _name(op) in _OPERATORS


def code_of(tensor: torch.Tensor, op: Any) -> int:
    """Size, type and operator in one number: equal on all members, if they mean the same."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes << 16 | _KINDS[tensor.dtype] << 8 | _OPERATORS[_name(op)][0]


def bytes_of(code: int) -> int:
    return code >> 16


def described(code: int) -> str:
    dtype = next((str(dtype) for dtype, number in _KINDS.items() if number == code >> 8 & 0xFF), "?")
    return f"{code >> 16} bytes of {dtype}"


def sliced(tensor: torch.Tensor, owners: int) -> list[slice]:
    """About equal parts of a flat tensor, one for each owner; the last ones may be empty."""
    count, unit = tensor.numel(), _SLICE_ALIGN_BYTES // tensor.element_size()
    each = -(-count // (owners * unit)) * unit
    return [slice(min(count, each * owner), min(count, each * (owner + 1))) for owner in range(owners)]


def combined(parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
    """The parts, one after the other, into `out`, which may be one of the first two of them.

    Types of 16 bits are rounded once, at the end.
    """
    if len(parts) > 2 and out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total = combine(total, part)
        out.copy_(total)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _name(op: Any) -> str:
    return str(op).rsplit(".", 1)[-1]


_WINDOW = 8
"""Pieces that are sent ahead although those before them could be read: few enough to stay in the cache."""
SLICED_FROM_BYTES = 128 << 10
"""From there on waiting a second time costs less than adding up everything in every member."""
_MOST_VIEWS = 1024


class SharedWork:
    """A launched reduction; it is done when all pieces before `end` have been read."""

    __slots__ = ("_group", "end")

    def __init__(self, group: HostGroup, end: int) -> None:
        self._group = group
        self.end = end

    def is_completed(self) -> bool:
        return self._group.has_done(self.end)


class HostGroup:
    """The members of one host. One thread uses it; `interrupt` may come from another.

    Args:
        base: what all counts of this round begin with, so that one of another round is never taken for one of this.
        owners: members that own a slice: equally many on every host.
        sliced_from: pieces of so many bytes are added up by their slices; None: none is.
        between: the owners of this member's slice on all hosts; None: there is one host, or this is no owner.
    """

    def __init__(
        self,
        met: Met,
        base: int,
        waiting: Waiting,
        owners: int,
        sliced_from: int | None,
        between: GlooGroup | None,
    ) -> None:
        self._own = met.own
        self._rank = met.rank
        self._peers = met.peers
        self._base = base
        self._waiting = waiting
        self._owners = owners
        self._sliced_from = sliced_from
        self._between = between
        self._closed = False
        self._launched = 0
        self._summed = 0
        """Pieces of which this member has added up its slice, as far as they have slices."""
        self._consumed = 0
        self._pending: deque[Piece] = deque()
        """Pieces from `_consumed` on."""
        self._crossing: deque[Piece] = deque()
        """Pieces whose slice is on its way between the hosts."""
        self._sent: deque[tuple[int, Room, int]] = deque()
        """Slots in use: number of the piece, and what the slot belongs to."""
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        waiting.meanwhile = take_part
        _groups.add(self)

    takes = staticmethod(reducible)
    """Whether this reduction can go this way: the same answer on every member."""

    def launch(self, tensor: torch.Tensor, op: Any, fill: Fill | None = None) -> SharedWork:
        """Send a contiguous tensor, or what `fill` writes; after `wait` it holds the result.

        Blocks while there is no room.
        """
        flat = tensor.view(-1)
        count, unit = flat.numel(), self._own.large.nbytes // flat.element_size()
        if 0 < count <= unit:
            self._send(flat, 0, op, fill)
        else:
            for start in range(0, count, unit):
                self._send(flat[start : start + unit], start, op, fill)
        return SharedWork(self, self._launched)

    def wait(self, work: SharedWork) -> None:
        while self._consumed < work.end:
            self._read_next()

    def has_done(self, end: int) -> bool:
        if self._closed:
            return True  # failed, as `Group.wait` will say
        self.take_part()
        while self._consumed < end and self._next_is_there():
            self._read_next()
        return self._consumed >= end

    @property
    def others_wait(self) -> bool:
        """Whether there are slices that others may need from this member."""
        return any(piece.slices for piece in self._pending)

    def interrupt(self) -> None:
        """The round is over; have who waits notice."""
        self._waiting.interrupt()

    def close(self) -> None:
        self._own.leave()
        self._let_go()

    def close_in_child(self) -> None:
        """In a forked child: only its own descriptors; the parent has not left."""
        self._own.close()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        _groups.discard(self)
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self._views.clear()
        self._pending.clear()
        self._crossing.clear()

    # --- sending --------------------------------------------------------------------------------

    def _send(self, out: torch.Tensor, start: int, op: Any, fill: Fill | None) -> None:
        code = code_of(out, op)
        room = self._own.small if bytes_of(code) <= SMALL_BYTES else self._own.large
        offset = self._slot(room)
        sent = self._view(self._own, -1, offset, code, out.dtype)
        if fill is None:
            sent.copy_(out)
        else:
            fill(sent, start)
        number = self._launched
        words = self._own.words
        at = TABLE + 2 * (number % DEPTH)
        words[at] = offset
        words[at + 1] = code
        by_slices = self._sliced_from is not None and bytes_of(code) >= self._sliced_from
        slices = sliced(out, self._owners) if by_slices else None
        self._launched = number + 1
        self._pending.append(Piece(number, out, sent, fill is None, code, op, slices))
        self._sent.append((number, room, offset))
        self._own.announce(ARRIVED, self._base + number + 1)
        if slices:
            self.take_part()

    def _slot(self, room: Room) -> int:
        if len(self._pending) >= _WINDOW and self._next_is_there():
            self._read_next()
        if not room.free or len(self._sent) >= DEPTH:
            self._reclaim()
        while len(self._sent) >= DEPTH or not (room.free or room.grow()):
            if self._pending:
                self._read_next()
            else:
                oldest = self._base + self._sent[0][0] + 1
                for peer in self._peers:
                    self._waiting.until(peer, CONSUMED, oldest)
            self._reclaim()
        return room.free.pop()

    def _reclaim(self) -> None:
        """Give back the slots that everybody has read."""
        read = min([self._consumed, *(peer.words[CONSUMED] - self._base for peer in self._peers)])
        while self._sent and self._sent[0][0] < read:
            _, room, offset = self._sent.popleft()
            room.free.append(offset)

    # --- adding up slices for all -----------------------------------------------------------------

    def take_part(self) -> None:
        """Do what others may wait for, as far as that is possible at once."""
        while self._summed < self._launched and self._has_arrived(self._summed):
            self._sum_slice(self._pending[self._summed - self._consumed])
        while self._crossing and self._crossing[0].between.is_completed():
            self._finish_crossing()

    def _sum_slice(self, piece: Piece) -> None:
        self._summed = piece.number + 1
        if piece.slices is None or self._rank >= self._owners:
            return
        mine = piece.slices[self._rank]
        part = piece.sent[mine]
        if part.numel() == 0:
            return
        if self._peers:
            total = piece.out[mine]
            combined([whole[mine] for whole in self._parts(piece, piece.sent)], total, piece.combine)
            part.copy_(total)
        if self._between is None:
            self._own.announce(REDUCED, self._base + self._summed)
        else:
            piece.between = self._between.allreduce(part, piece.op)
            self._crossing.append(piece)

    def _finish_crossing(self) -> None:
        """Wait for the first slice that is under way between the hosts, and let the others read it."""
        assert self._between is not None
        self._between.wait(self._crossing[0].between)
        piece = self._crossing.popleft()
        self._own.announce(REDUCED, self._base + piece.number + 1)

    # --- reading --------------------------------------------------------------------------------

    def _has_arrived(self, number: int) -> bool:
        due = self._base + number + 1
        return all(peer.words[ARRIVED] >= due for peer in self._peers)

    def _next_is_there(self) -> bool:
        """Whether `_read_next` would not wait."""
        piece = self._pending[0]
        if piece.slices is None:
            return self._has_arrived(piece.number)
        if self._summed <= piece.number or self._is_crossing(piece):
            return False
        due = self._base + piece.number + 1
        return all(peer.words[REDUCED] >= due for peer in self._owners_of(piece))

    def _is_crossing(self, piece: Piece) -> bool:
        return bool(self._crossing) and self._crossing[0].number <= piece.number

    def _owners_of(self, piece: Piece) -> list[Peer]:
        """The others that have a slice of it."""
        assert piece.slices is not None
        parts = piece.slices
        return [p for p in self._peers if p.rank < len(parts) and parts[p.rank].start < parts[p.rank].stop]

    def _read_next(self) -> None:
        piece = self._pending[0]
        due = self._base + piece.number + 1
        if self._summed <= piece.number:
            for peer in self._peers:
                self._waiting.until(peer, ARRIVED, due)
        if piece.slices is None:
            # the sum is written to `out` after the first two parts were read: until then it may be one of them
            parts = self._parts(piece, piece.out if piece.in_place and self._rank < 2 else piece.sent)
            combined(parts, piece.out, piece.combine)
            self._summed = max(self._summed, piece.number + 1)
        else:
            self.take_part()
            while self._is_crossing(piece):
                self._finish_crossing()
            self._read_slices(piece, due)
        self._pending.popleft()
        self._consumed = piece.number + 1
        self._own.announce(CONSUMED, due)

    def _read_slices(self, piece: Piece, due: int) -> None:
        assert piece.slices is not None
        if piece.between is not None:
            mine = piece.slices[self._rank]
            piece.out[mine].copy_(piece.sent[mine])
        for peer in self._owners_of(piece):
            self._waiting.until(peer, REDUCED, due)
            theirs = piece.slices[peer.rank]
            piece.out[theirs].copy_(self._part(piece, peer)[theirs])

    def _parts(self, piece: Piece, mine: torch.Tensor) -> list[torch.Tensor]:
        """What each member has sent, in rank order. Raises: UsageError: they mean different things."""
        parts = [self._part(piece, peer) for peer in self._peers]
        parts.insert(self._rank, mine)
        return parts

    def _part(self, piece: Piece, peer: Peer) -> torch.Tensor:
        at = TABLE + 2 * (piece.number % DEPTH)
        if peer.words[at + 1] != piece.code:
            raise UsageError(
                "ranks reduce different tensors at a time; call collectives in the same order everywhere: "
                f"{described(peer.words[at + 1])} on local rank {peer.rank}, {described(piece.code)} on {self._rank}"
            )
        return self._view(peer.segment, peer.rank, peer.words[at], piece.code, piece.out.dtype)

    def _view(self, segment: Any, rank: int, offset: int, code: int, dtype: torch.dtype) -> torch.Tensor:
        key = (rank, offset, code)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = segment.view(offset, bytes_of(code), dtype)
        return found


_groups: weakref.WeakSet[HostGroup] = weakref.WeakSet()


def take_part() -> None:
    """While this process waits for something: do what others may wait for, in all its groups."""
    for group in list(_groups):
        if group.others_wait:
            group.take_part()
