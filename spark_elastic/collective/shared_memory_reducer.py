"""Reductions and broadcasts among the processes of one host, through the segments of `shared_memory`.

A tensor is sent in chunks. A member copies a chunk into its own segment and counts it as arrived. Then either

- every member combines the chunks of all, in the order of their ranks, directly into its own result: it waits for each
  other member once, for its contribution; or
- (large chunks of many members, and several hosts) each owner combines one slice, reduces it with the owners of the
  same slice on the other hosts and leaves it in its own segment, and every member reads all slices.

Either way all members get the same bits. A slot of a segment is reused once all members have read it.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from spark_elastic import clock
from spark_elastic.collective.combining import DTYPES, OPERATORS, combine_function, combine_into, operator_name
from spark_elastic.collective.gloo import Fill, GlooGroup
from spark_elastic.collective.joining import STALL_S
from spark_elastic.collective.shared_memory import (
    ARRIVED,
    CONSUMED,
    DEPTH,
    LEFT,
    REDUCED,
    SMALL_BYTES,
    TABLE,
    HostPeers,
    Mapping,
    Peer,
    SlotPool,
    fence,
    first_count,
    futex_wait,
    futex_wake,
)
from spark_elastic.errors import HorovodInternalError, UsageError

# --- chunks: their codes in the table, and how they are cut into slices --------------------------------

_BROADCAST = 0xFF
"""The number of a broadcast among those of the operators."""
_SLICE_ALIGN_BYTES = 64
"""Two members never write to one cache line."""


class Root(NamedTuple):
    """The sender of a broadcast; it takes the place of a reduction's operator."""

    local_rank: int | None
    """Its rank among the members on this host; None: it is on another host."""
    host: int
    """The number of its host."""


@dataclass(slots=True)
class Chunk:
    """A chunk that this member has sent, and whose result it has not read yet."""

    number: int
    out: torch.Tensor
    """The destination of the result."""
    sent: torch.Tensor
    """This member's contribution, in its segment."""
    in_place: bool
    """`out` holds the contribution too, until it is overwritten by the result."""
    code: int
    """See `chunk_code`."""
    op: Any
    """Gloo's reduction operator, or the `Root` of a broadcast."""
    slices: list[slice] | None
    """The elements that each owner combines for all; None: every member combines all elements."""
    between: Any = None
    """The reduction of this member's slice with the other hosts."""

    @property
    def combine(self) -> Callable[..., torch.Tensor]:
        return combine_function(self.op)


def chunk_code(tensor: torch.Tensor, op: Any) -> int:
    """Encode size, type and operator in one number; it is equal on all members if their calls match."""
    nbytes = tensor.numel() * tensor.element_size()
    number = _BROADCAST if isinstance(op, Root) else OPERATORS[operator_name(op)][0]
    return nbytes << 16 | DTYPES[tensor.dtype] << 8 | number


def _chunk_bytes(code: int) -> int:
    return code >> 16


def _described(code: int) -> str:
    dtype = next((str(dtype) for dtype, number in DTYPES.items() if number == code >> 8 & 0xFF), "?")
    return f"{_chunk_bytes(code)} bytes of {dtype}"


def slices_of(tensor: torch.Tensor, owners: int) -> list[slice]:
    """Divide a flat tensor into about equal slices, one for each owner; the last ones may be empty."""
    count, unit = tensor.numel(), _SLICE_ALIGN_BYTES // tensor.element_size()
    each = -(-count // (owners * unit)) * unit
    return [slice(min(count, each * owner), min(count, each * (owner + 1))) for owner in range(owners)]


# --- waiting for a peer -----------------------------------------------------------------------------

SPIN_S = 100e-6
"""About the cost of a sleep and its wake-up. A longer spin takes the core from a peer that needs it to compute."""
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.5e-3, 20e-3


class SpinWait:
    """Waits for a counter of a peer to reach a value: spins for a moment, then sleeps until the peer wakes it.

    Args:
        check: raises if the round is over.
        report_stall: called with True when a wait takes longer than `STALL_S`, and with False when that wait ends.
        meanwhile: does other work; called after each sleep of a wait.
    """

    def __init__(
        self, check: Callable[[], None], report_stall: Callable[[bool], None], meanwhile: Callable[[], None]
    ) -> None:
        self._check = check
        self._report_stall = report_stall
        self._meanwhile = meanwhile
        self._asleep_on = 0

    def until(self, peer: Peer, counter: int, target: int) -> None:
        """Block until a counter of the peer's segment is at least `target`; `counter` is its index.

        What the peer wrote before that count can be read afterwards.

        Raises:
            HorovodInternalError: the peer has left or died, or this round's collectives were ended.
        """
        self._until(peer, counter, target)
        fence()

    def _until(self, peer: Peer, counter: int, target: int) -> None:
        counters = peer.counters
        if counters[counter] >= target:
            return
        give_up = clock.monotonic() + SPIN_S
        while clock.monotonic() < give_up:
            for _ in range(4):
                if counters[counter] >= target:
                    return
            os.sched_yield()
        self._sleep_until(peer, counter, target)

    def _sleep_until(self, peer: Peer, counter: int, target: int) -> None:
        counters = peer.counters
        address = peer.counter_address(counter)
        nap, stall_at, stalled = _SHORTEST_NAP_S, clock.monotonic() + STALL_S, False
        try:
            while (value := counters[counter]) < target:
                self._asleep_on = address
                self._check()
                if counters[LEFT]:
                    fence()  # it counted its last chunks before it left
                    if counters[counter] < target:
                        raise HorovodInternalError(f"a collective failed: rank {peer.rank} has left the round")
                futex_wait(address, value, nap)
                self._meanwhile()
                if nap > _SHORTEST_NAP_S and peer.is_dead() and counters[counter] < target:
                    raise HorovodInternalError(f"a collective failed: the process of rank {peer.rank} is gone")
                nap = min(2 * nap, _LONGEST_NAP_S)
                if not stalled and clock.monotonic() >= stall_at:
                    stalled = True
                    self._report_stall(True)
        finally:
            self._asleep_on = 0
            if stalled:
                self._report_stall(False)

    def interrupt(self) -> None:
        """Wake a sleeping wait so that it checks the round again; from any thread."""
        if self._asleep_on:
            futex_wake(self._asleep_on)


# --- reducing ---------------------------------------------------------------------------------------

_WINDOW = 8
"""The number of chunks to send before results that are ready are read: few enough to stay in the cache."""
SLICED_FROM_BYTES = 128 << 10
"""For chunks of this size and more, a second wait costs less than combining all elements in every member."""
_MOST_VIEWS = 1024


class SharedWork(NamedTuple):
    """A launched reduction; it is complete when all chunks before `end` have been read."""

    reducer: SharedMemoryReducer
    end: int

    def is_completed(self) -> bool:
        return self.reducer.has_done(self.end)


class SharedMemoryReducer:
    """Reductions and broadcasts among the members of one host, and with those of other hosts.

    One thread uses it; `interrupt` may be called from another.

    Args:
        found: the members of this host.
        round: the round of their group.
        wait: waits for peers.
        owners: the number of members that own a slice, the same on every host.
        sliced_from: the size in bytes from which chunks are reduced by slices; 0 with several hosts; None: no chunk is.
        between: the owners of this member's slice on all hosts; None if there is one host, or if this member owns none.
    """

    def __init__(
        self,
        found: HostPeers,
        round: int,
        wait: SpinWait,
        owners: int,
        sliced_from: int | None,
        between: GlooGroup | None,
    ) -> None:
        self._own = found.own
        self._rank = found.rank
        self._peers = found.peers
        self._base = first_count(round)
        self._spin_wait = wait
        self._owners = owners
        self._sliced_from = sliced_from
        self._between = between
        self._closed = False
        self._launched = 0
        self._summed = 0
        """The count of chunks whose slice this member has combined, if they have slices."""
        self._consumed = 0
        self._pending: deque[Chunk] = deque()
        """The chunks from `_consumed` on."""
        self._crossing: deque[Chunk] = deque()
        """Chunks whose slice is being reduced between the hosts."""
        self._sent: deque[tuple[int, SlotPool, int]] = deque()
        """The slots in use: the number of the chunk, the pool of the slot, and its offset."""
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        _reducers.add(self)

    def launch(self, tensor: torch.Tensor, op: Any, fill: Fill | None = None) -> SharedWork:
        """Send a contiguous tensor, or the values that `fill` writes; after `wait` the tensor holds the result.

        Blocks while there is no free slot.
        """
        flat = tensor.view(-1)
        count, unit = flat.numel(), self._own.large.nbytes // flat.element_size()
        if 0 < count <= unit:
            self._send(flat, 0, op, fill)
        else:
            for start in range(0, count, unit):
                self._send(flat[start : start + unit], start, op, fill)
        return SharedWork(self, self._launched)

    def launch_broadcast(self, tensor: torch.Tensor, root: Root) -> SharedWork:
        """Send the bytes of the root's tensor, shape (bytes,), to all members; see `launch`."""
        fill = None if root.local_rank == self._rank else _nothing
        return self.launch(tensor, root, fill)

    def wait(self, work: SharedWork) -> None:
        while self._consumed < work.end:
            self._read_next()

    def has_done(self, end: int) -> bool:
        if self._closed:
            return True  # it has failed; `Group.wait` raises the error
        self.serve_peers()
        while self._consumed < end and self._next_is_ready():
            self._read_next()
        return self._consumed >= end

    @property
    def others_wait(self) -> bool:
        """True while there are slices that others may need from this member."""
        return any(chunk.slices for chunk in self._pending)

    def interrupt(self) -> None:
        """Wake a sleeping wait so that it checks the round again; from any thread."""
        self._spin_wait.interrupt()

    def close(self) -> None:
        self._own.leave()
        self._release()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the descriptors; the parent stays in the round."""
        self._own.close()
        self._release()

    def _release(self) -> None:
        self._closed = True
        _reducers.discard(self)
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self._views.clear()
        self._pending.clear()
        self._crossing.clear()

    # --- sending --------------------------------------------------------------------------------

    def _send(self, out: torch.Tensor, start: int, op: Any, fill: Fill | None) -> None:
        code = chunk_code(out, op)
        pool = self._own.small if _chunk_bytes(code) <= SMALL_BYTES else self._own.large
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
        by_slices = self._sliced_from is not None and _chunk_bytes(code) >= self._sliced_from
        if isinstance(op, Root) and self._sliced_from:
            by_slices = False  # on one host, all members read the root's chunk
        slices = slices_of(out, self._owners) if by_slices else None
        self._launched = number + 1
        self._pending.append(Chunk(number, out, sent, fill is None, code, op, slices))
        self._sent.append((number, pool, offset))
        self._own.announce(ARRIVED, self._base + number + 1)
        if slices:
            self.serve_peers()

    def _slot(self, pool: SlotPool) -> int:
        if len(self._pending) >= _WINDOW and self._next_is_ready():
            self._read_next()
        if not pool.free or len(self._sent) >= DEPTH:
            self._reclaim()
        while len(self._sent) >= DEPTH or not (pool.free or pool.grow()):
            if self._pending:
                self._read_next()
            else:
                oldest = self._base + self._sent[0][0] + 1
                for peer in self._peers:
                    self._spin_wait.until(peer, CONSUMED, oldest)
            self._reclaim()
        return pool.free.pop()

    def _reclaim(self) -> None:
        """Return the slots to their pools that all members have read."""
        read = min([self._consumed, *(peer.counters[CONSUMED] - self._base for peer in self._peers)])
        fence()
        while self._sent and self._sent[0][0] < read:
            _, pool, offset = self._sent.popleft()
            pool.free.append(offset)

    # --- combining slices for all -----------------------------------------------------------------

    def serve_peers(self) -> None:
        """Do the work that others may wait for, as far as it is possible without waiting."""
        while self._summed < self._launched and self._has_arrived(self._summed):
            self._sum_slice(self._pending[self._summed - self._consumed])
        while self._crossing and self._crossing[0].between.is_completed():
            self._finish_crossing()

    def _sum_slice(self, chunk: Chunk) -> None:
        self._summed = chunk.number + 1
        if chunk.slices is None or self._rank >= self._owners:
            return
        mine = chunk.slices[self._rank]
        part = chunk.sent[mine]
        if part.numel() == 0:
            return
        if isinstance(chunk.op, Root):
            sender = self._sender_of(chunk)
            if sender is not None:
                part.copy_(self._part(chunk, sender)[mine])
        elif self._peers:
            total = chunk.out[mine]
            combine_into([whole[mine] for whole in self._parts(chunk, chunk.sent)], total, chunk.combine)
            part.copy_(total)
        if self._between is None:
            self._own.announce(REDUCED, self._base + self._summed)
            return
        if isinstance(chunk.op, Root):
            chunk.between = self._between.broadcast(part, chunk.op.host)
        else:
            chunk.between = self._between.allreduce(part, chunk.op)
        self._crossing.append(chunk)

    def _sender_of(self, chunk: Chunk) -> Peer | None:
        """Return the root of a broadcast; None if it is this member, or on another host."""
        return next((peer for peer in self._peers if peer.rank == chunk.op.local_rank), None)

    def _finish_crossing(self) -> None:
        """Wait for the oldest slice that is being reduced between the hosts, and let the others read it."""
        assert self._between is not None
        self._between.wait(self._crossing[0].between)
        chunk = self._crossing.popleft()
        self._own.announce(REDUCED, self._base + chunk.number + 1)

    # --- reading --------------------------------------------------------------------------------

    def _has_arrived(self, number: int) -> bool:
        return self._all_counted(ARRIVED, number, self._peers)

    def _all_counted(self, counter: int, number: int, peers: Sequence[Peer]) -> bool:
        """Return True if a counter of all these peers includes the chunk, and then let its data be read."""
        due = self._base + number + 1
        if not all(peer.counters[counter] >= due for peer in peers):
            return False
        fence()
        return True

    def _next_is_ready(self) -> bool:
        """Return True if `_read_next` would not wait."""
        chunk = self._pending[0]
        if chunk.slices is None:
            return self._has_arrived(chunk.number)
        if self._summed <= chunk.number or self._is_crossing(chunk):
            return False
        return self._all_counted(REDUCED, chunk.number, self._owners_of(chunk))

    def _is_crossing(self, chunk: Chunk) -> bool:
        return bool(self._crossing) and self._crossing[0].number <= chunk.number

    def _owners_of(self, chunk: Chunk) -> list[Peer]:
        """Return the other members that own a slice of the chunk."""
        assert chunk.slices is not None
        parts = chunk.slices
        return [p for p in self._peers if p.rank < len(parts) and parts[p.rank].start < parts[p.rank].stop]

    def _read_next(self) -> None:
        chunk = self._pending[0]
        due = self._base + chunk.number + 1
        if self._summed <= chunk.number:
            for peer in self._peers:
                self._spin_wait.until(peer, ARRIVED, due)
        if chunk.slices is None and isinstance(chunk.op, Root):
            sender = self._sender_of(chunk)
            if sender is not None:
                chunk.out.copy_(self._part(chunk, sender))
            self._summed = max(self._summed, chunk.number + 1)
        elif chunk.slices is None:
            # `out` is written after the first two parts were read, so it may be one of those two
            parts = self._parts(chunk, chunk.out if chunk.in_place and self._rank < 2 else chunk.sent)
            combine_into(parts, chunk.out, chunk.combine)
            self._summed = max(self._summed, chunk.number + 1)
        else:
            self.serve_peers()
            while self._is_crossing(chunk):
                self._finish_crossing()
            self._read_slices(chunk, due)
        self._pending.popleft()
        self._consumed = chunk.number + 1
        self._own.announce(CONSUMED, due)

    def _read_slices(self, chunk: Chunk, due: int) -> None:
        assert chunk.slices is not None
        if chunk.between is not None:
            mine = chunk.slices[self._rank]
            chunk.out[mine].copy_(chunk.sent[mine])
        for peer in self._owners_of(chunk):
            self._spin_wait.until(peer, REDUCED, due)
            theirs = chunk.slices[peer.rank]
            chunk.out[theirs].copy_(self._part(chunk, peer)[theirs])

    def _parts(self, chunk: Chunk, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return each member's contribution, in rank order.

        Raises:
            UsageError: the members reduce different tensors.
        """
        parts = [self._part(chunk, peer) for peer in self._peers]
        parts.insert(self._rank, mine)
        return parts

    def _part(self, chunk: Chunk, peer: Peer) -> torch.Tensor:
        at = TABLE + 2 * (chunk.number % DEPTH)
        code = peer.counters[at + 1]
        if code != chunk.code:
            raise UsageError(
                "ranks reduce different tensors at the same time; call collectives in the same order everywhere: "
                f"{_described(code)} on local rank {peer.rank}, {_described(chunk.code)} on {self._rank}"
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


def _nothing(out: torch.Tensor, start: int) -> None:
    """Write nothing: a member that receives a broadcast contributes nothing to it."""


_reducers: weakref.WeakSet[SharedMemoryReducer] = weakref.WeakSet()


def serve_peers() -> None:
    """Do the work that others may wait for, in all groups; called while this process waits for something."""
    for reducer in list(_reducers):
        if reducer.others_wait:
            reducer.serve_peers()
