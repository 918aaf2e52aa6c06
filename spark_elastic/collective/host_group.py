"""Reductions among the processes of one host, through memory that they share.

A tensor is sent in pieces. A member copies a piece into its own segment and counts it as arrived; who waits for the
result adds up what all members have there, in the order of their ranks, so that every member gets the same bits. Every
member does that for itself: nobody has to be waited for but for its own contribution. A slot of the segment is used
again once all members have read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_elastic.collective.host_waiting import Peer, Waiting
from spark_elastic.collective.segment import (
    ARRIVED,
    CONSUMED,
    DEPTH,
    LARGE_BYTES,
    SMALL_BYTES,
    TABLE,
    OwnSegment,
    Room,
)
from spark_elastic.errors import UsageError

_WINDOW = 8
"""Pieces that are sent ahead although those before them could be read: few enough to stay in the cache."""
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
        peers: the other members.
        base: what all counts of this round begin with, so that one of another round is never taken for one of this.
    """

    def __init__(self, own: OwnSegment, rank: int, peers: Sequence[Peer], base: int, waiting: Waiting) -> None:
        self._own = own
        self._rank = rank
        self._peers = list(peers)
        self._base = base
        self._waiting = waiting
        self._launched = 0
        self._consumed = 0
        self._pending: deque[tuple[torch.Tensor, torch.Tensor, int, Any]] = deque()
        """Pieces that were launched and not read: where the result goes, what is sent, its code, the operator."""
        self._sent: deque[tuple[int, Room, int]] = deque()
        """Slots in use: number of the piece, and what the slot belongs to."""
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}

    @staticmethod
    def takes(tensor: torch.Tensor, op: Any) -> bool:
        """Whether this reduction can go this way: the same answer on every member."""
        return tensor.dtype in _KINDS and tensor.device.type == "cpu" and _name(op) in _OPERATORS

    def launch(self, tensor: torch.Tensor, op: Any) -> SharedWork:
        """Send a contiguous tensor; after `wait` it holds the result. Blocks while there is no room."""
        operator = _OPERATORS[_name(op)]
        flat = tensor.view(-1)
        count, unit = flat.numel(), LARGE_BYTES // flat.element_size()
        if 0 < count <= unit:
            self._send(flat, operator)
        else:
            for start in range(0, count, unit):
                self._send(flat[start : start + unit], operator)
        return SharedWork(self, self._launched)

    def wait(self, work: SharedWork) -> None:
        while self._consumed < work.end:
            self._read_next()

    def has_done(self, end: int) -> bool:
        while self._consumed < end and self._next_has_arrived():
            self._read_next()
        return self._consumed >= end

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
        for peer in self._peers:
            peer.close()
        self._views.clear()
        self._pending.clear()

    # --- sending --------------------------------------------------------------------------------

    def _send(self, piece: torch.Tensor, operator: tuple[int, Any]) -> None:
        nbytes = piece.numel() * piece.element_size()
        room = self._own.small if nbytes <= SMALL_BYTES else self._own.large
        offset = self._slot(room)
        code = nbytes << 16 | _KINDS[piece.dtype] << 8 | operator[0]
        sent = self._view(self._own, -1, offset, code, piece.dtype)
        sent.copy_(piece)
        number = self._launched
        words = self._own.words
        at = TABLE + 2 * (number % DEPTH)
        words[at] = offset
        words[at + 1] = code
        self._launched = number + 1
        self._pending.append((piece, sent, code, operator[1]))
        self._sent.append((number, room, offset))
        self._own.announce(ARRIVED, self._base + number + 1)

    def _slot(self, room: Room) -> int:
        if len(self._pending) >= _WINDOW and self._next_has_arrived():
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
        read = min(self._consumed, *(peer.words[CONSUMED] - self._base for peer in self._peers))
        while self._sent and self._sent[0][0] < read:
            _, room, offset = self._sent.popleft()
            room.free.append(offset)

    # --- reading --------------------------------------------------------------------------------

    def _next_has_arrived(self) -> bool:
        due = self._base + self._consumed + 1
        return all(peer.words[ARRIVED] >= due for peer in self._peers)

    def _read_next(self) -> None:
        number = self._consumed
        out, sent, code, combine = self._pending[0]
        due = self._base + number + 1
        at = TABLE + 2 * (number % DEPTH)
        parts: list[torch.Tensor] = []
        # what is sent lies in `out`, too, until the sum is written there: after the first two parts
        mine = out if self._rank < 2 else sent
        for peer in self._peers:
            self._waiting.until(peer, ARRIVED, due)
            if len(parts) == self._rank:
                parts.append(mine)
            offset = peer.words[at]
            if peer.words[at + 1] != code:
                raise UsageError(
                    "ranks reduce different tensors at a time; call collectives in the same order everywhere: "
                    f"{_described(peer.words[at + 1])} on rank {peer.rank}, {_described(code)} on rank {self._rank}"
                )
            parts.append(self._view(peer.segment, peer.rank, offset, code, out.dtype))
        if len(parts) == self._rank:
            parts.append(mine)
        _combine(parts, out, combine)
        self._pending.popleft()
        self._consumed = number + 1
        self._own.announce(CONSUMED, due)

    def _view(self, segment: Any, rank: int, offset: int, code: int, dtype: torch.dtype) -> torch.Tensor:
        key = (rank, offset, code)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = segment.view(offset, code >> 16, dtype)
        return found


def _combine(parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
    """The parts, one after the other, into `out`; types of 16 bits are rounded once, at the end."""
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


def _described(code: int) -> str:
    dtype = next((str(dtype) for dtype, number in _KINDS.items() if number == code >> 8 & 0xFF), "?")
    return f"{code >> 16} bytes of {dtype}"
