"""Reductions and broadcasts among the processes of one host, through the segments of `shared_memory`.

A tensor is sent in chunks. A member copies a chunk into its own segment and counts it as arrived. Every member then
combines the chunks of all, in the order of their ranks, directly into its own result: it waits for each other member
once, for its contribution, and all members get the same bits. A slot of a segment is reused once all members have read
it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from spark_elastic import clock
from spark_elastic.collective.reduce import (
    CHUNKS_BEFORE_READING,
    SMALL_CHUNK_BYTES,
    SPIN_S,
    STALL_S,
    Fill,
    GroupContext,
)
from spark_elastic.collective.shared_memory.segments import (
    ARRIVED,
    CONSUMED,
    DEPTH,
    LEFT,
    TABLE,
    Mapping,
    OwnSegment,
    Peer,
    SlotPool,
    fence,
    first_count,
    futex_wait,
    futex_wake,
)
from spark_elastic.errors import HorovodInternalError, UsageError

# --- combining, in the order of the ranks ---------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
"""The types that are combined here; Gloo reduces others."""
OPERATORS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "SUM": (0, torch.add),
    "PRODUCT": (1, torch.mul),
    "MIN": (2, torch.minimum),
    "MAX": (3, torch.maximum),
}
"""The operators by Gloo's names: their numbers in `chunk_code`, and their functions."""


def operator_name(op: Any) -> str:
    """Return the name of Gloo's operator, without the name of its class."""
    return str(op).rsplit(".", 1)[-1]


def combine_into(parts: Sequence[torch.Tensor], out: torch.Tensor, op: Any) -> None:
    """Combine parts into `out`, which may be one of the first two; types of 16 bits are rounded once, at the end."""
    combine = OPERATORS[operator_name(op)][1]
    if len(parts) > 2 and out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total = combine(total, part)
        out.copy_(total)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


# --- chunks and their codes in the table ----------------------------------------------------------------

_BROADCAST = 0xFF
"""The number of a broadcast among those of the operators."""


@dataclass(slots=True)
class Chunk:
    """A chunk that this member has sent, and whose result it has not read yet."""

    number: int
    out: torch.Tensor
    """The destination of the result."""
    mine: torch.Tensor
    """This member's contribution."""
    code: int
    """See `chunk_code`."""
    op: Any
    """Gloo's reduction operator; None for a broadcast."""
    root: int
    """The rank of the sender of a broadcast."""


def chunk_code(tensor: torch.Tensor, op: Any) -> int:
    """Encode size, type and operator (None: a broadcast) in one number; equal on all members if their calls match."""
    nbytes = tensor.numel() * tensor.element_size()
    number = _BROADCAST if op is None else OPERATORS[operator_name(op)][0]
    return nbytes << 16 | DTYPES.index(tensor.dtype) << 8 | number


def _chunk_bytes(code: int) -> int:
    return code >> 16


def _described(code: int) -> str:
    return f"{_chunk_bytes(code)} bytes of {DTYPES[code >> 8 & 0xFF]}"


# --- reducing ---------------------------------------------------------------------------------------

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.5e-3, 20e-3
_MOST_VIEWS = 1024


class SharedWork(NamedTuple):
    """A launched reduction; it is complete when all chunks before `end` have been read."""

    way: SharedMemoryReducer
    end: int

    def is_completed(self) -> bool:
        return self.way.has_done(self.end)


class SharedMemoryReducer:
    """Reductions and broadcasts in a group on one host. One thread uses it; `cut` may be called from another."""

    def __init__(self, own: OwnSegment, peers: list[Peer], owner: GroupContext) -> None:
        self._owner = owner
        self._own = own
        self._rank = owner.rank
        self._peers = peers
        self._base = first_count(owner.round)
        self._asleep_on = 0
        """The address of the counter that a wait sleeps on; 0: none sleeps."""
        self._closed = False
        self._launched = 0
        self._consumed = 0
        self._pending: deque[Chunk] = deque()
        """The chunks from `_consumed` on."""
        self._sent: deque[tuple[int, SlotPool, int]] = deque()
        """The slots in use: the number of the chunk, the pool of the slot, and its offset."""
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}

    def reduces(self, tensor: torch.Tensor, op: Any) -> bool:
        return tensor.dtype in DTYPES and operator_name(op) in OPERATORS

    def allreduce(self, tensor: torch.Tensor, op: Any, fill: Fill | None = None) -> SharedWork:
        """Send a contiguous tensor, or what `fill` writes; after `wait` the tensor holds the result. May block."""
        return self._launch(tensor, op, 0, fill)

    def broadcast(self, tensor: torch.Tensor, root: int) -> SharedWork:
        """Send the bytes of the root's tensor, shape (bytes,), to all members; see `allreduce`."""
        # a member that receives contributes nothing
        return self._launch(tensor, None, root, None if root == self._rank else lambda out, start: None)

    def _launch(self, tensor: torch.Tensor, op: Any, root: int, fill: Fill | None) -> SharedWork:
        flat = tensor.view(-1)
        count, unit = flat.numel(), self._own.large.nbytes // flat.element_size()
        for start in range(0, count, unit):
            self._send(flat if count <= unit else flat[start : start + unit], start, op, root, fill)
        return SharedWork(self, self._launched)

    def wait(self, work: SharedWork) -> None:
        self._owner.check_alive()
        while self._consumed < work.end:
            self._read_next()

    def has_done(self, end: int) -> bool:
        if self._closed:
            return True  # it has failed; `Group.wait` raises the error
        while self._consumed < end and self._next_is_ready():
            self._read_next()
        return self._consumed >= end

    def cut(self) -> None:
        """Wake a sleeping wait so that it checks the round again; from any thread."""
        if address := self._asleep_on:
            futex_wake(address)

    def close(self) -> None:
        self._own.leave()
        self._release()

    def close_in_child(self) -> None:
        self._own.close()
        self._release()

    def _release(self) -> None:
        self._closed = True
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self._views.clear()
        self._pending.clear()

    # --- sending --------------------------------------------------------------------------------

    def _send(self, out: torch.Tensor, start: int, op: Any, root: int, fill: Fill | None) -> None:
        code = chunk_code(out, op)
        pool = self._own.small if _chunk_bytes(code) <= SMALL_CHUNK_BYTES else self._own.large
        offset = self._slot(pool)
        sent = self._view(self._own, -1, offset, code, out.dtype)
        if fill is None:
            sent.copy_(out)
        else:
            fill(sent, start)
        number = self._launched
        counters = self._own.counters
        at = TABLE + 2 * (number % DEPTH)
        counters[at] = offset
        counters[at + 1] = code
        self._launched = number + 1
        # `out` is written after the first two parts were read, so it may be one of those two
        mine = out if fill is None and self._rank < 2 else sent
        self._pending.append(Chunk(number, out, mine, code, op, root))
        self._sent.append((number, pool, offset))
        self._own.announce(ARRIVED, self._base + number + 1)

    def _slot(self, pool: SlotPool) -> int:
        if len(self._pending) >= CHUNKS_BEFORE_READING and self._next_is_ready():
            self._read_next()
        if not pool.free or len(self._sent) >= DEPTH:
            self._reclaim()
        while len(self._sent) >= DEPTH or not (pool.free or pool.grow()):
            if self._pending:
                self._read_next()
            else:
                oldest = self._base + self._sent[0][0] + 1
                for peer in self._peers:
                    self._wait_until(peer, CONSUMED, oldest)
            self._reclaim()
        return pool.free.pop()

    def _reclaim(self) -> None:
        """Return the slots to their pools that all members have read."""
        read = min([self._consumed, *(peer.counters[CONSUMED] - self._base for peer in self._peers)])
        fence()
        while self._sent and self._sent[0][0] < read:
            _, pool, offset = self._sent.popleft()
            pool.free.append(offset)

    # --- reading --------------------------------------------------------------------------------

    def _next_is_ready(self) -> bool:
        """Return True if `_read_next` would not wait."""
        due = self._base + self._pending[0].number + 1
        return all(peer.counters[ARRIVED] >= due for peer in self._peers)

    def _read_next(self) -> None:
        chunk = self._pending[0]
        due = self._base + chunk.number + 1
        for peer in self._peers:
            self._wait_until(peer, ARRIVED, due)
        if chunk.op is not None:
            parts = [self._part(chunk, peer) for peer in self._peers]
            parts.insert(self._rank, chunk.mine)
            combine_into(parts, chunk.out, chunk.op)
        elif chunk.root != self._rank:
            sender = next(peer for peer in self._peers if peer.rank == chunk.root)
            chunk.out.copy_(self._part(chunk, sender))
        self._pending.popleft()
        self._consumed = chunk.number + 1
        self._own.announce(CONSUMED, due)

    def _part(self, chunk: Chunk, peer: Peer) -> torch.Tensor:
        """Return the peer's contribution. Raise UsageError if it reduces another tensor."""
        at = TABLE + 2 * (chunk.number % DEPTH)
        code = peer.counters[at + 1]
        if code != chunk.code:
            raise UsageError(
                "ranks reduce different tensors at the same time; call collectives in the same order everywhere: "
                f"{_described(code)} on rank {peer.rank}, {_described(chunk.code)} on {self._rank}"
            )
        return self._view(peer, peer.rank, peer.counters[at], chunk.code, chunk.out.dtype)

    def _view(self, segment: Mapping, rank: int, offset: int, code: int, dtype: torch.dtype) -> torch.Tensor:
        key = (rank, offset, code)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = segment.view(offset, _chunk_bytes(code), dtype)
        return found

    # --- waiting for a peer -----------------------------------------------------------------------

    def _wait_until(self, peer: Peer, counter: int, target: int) -> None:
        """Block until the counter of this index is at least `target`; what the peer wrote before can be read then.

        Raises:
            HorovodInternalError: the peer has left or died, or this round's collectives were ended.
        """
        if peer.counters[counter] < target:
            self._spin_and_sleep(peer, counter, target)
        fence()

    def _spin_and_sleep(self, peer: Peer, counter: int, target: int) -> None:
        counters = peer.counters
        give_up = clock.monotonic() + SPIN_S
        while clock.monotonic() < give_up:
            for _ in range(4):
                if counters[counter] >= target:
                    return
            os.sched_yield()
        address = peer.counter_address(counter)
        nap, stall_at, stalled = _SHORTEST_NAP_S, clock.monotonic() + STALL_S, False
        try:
            while (value := counters[counter]) < target:
                self._asleep_on = address
                self._owner.check_alive()
                if counters[LEFT]:
                    fence()  # it counted its last chunks before it left
                    if counters[counter] < target:
                        raise HorovodInternalError(f"a collective failed: rank {peer.rank} has left the round")
                futex_wait(address, value, nap)
                if nap > _SHORTEST_NAP_S and peer.is_dead() and counters[counter] < target:
                    raise HorovodInternalError(f"a collective failed: the process of rank {peer.rank} is gone")
                nap = min(2 * nap, _LONGEST_NAP_S)
                if not stalled and clock.monotonic() >= stall_at:
                    stalled = True
                    self._owner.report_stall(True)
        finally:
            self._asleep_on = 0
            if stalled:
                self._owner.report_stall(False)
