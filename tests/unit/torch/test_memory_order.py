"""The order of accesses to memory that members share, on processors that keep less of it than x86-64 does."""

from __future__ import annotations

import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from spark_elastic.collective.shared_memory import reducer, segments
from spark_elastic.collective.shared_memory.reducer import SharedMemoryReducer
from spark_elastic.collective.shared_memory.segments import ARRIVED, CONSUMED, OwnSegment, Peer
from tests.unit.torch.memory_order import RaceDetector, load, lock_calls, outcomes, store

pytestmark = pytest.mark.skipif(not segments.FUTEX_AVAILABLE, reason="words cannot be shared here")


# --- the fence, as ARM's memory model sees it -----------------------------------------------------------------


def calls_of_the_fence(monkeypatch) -> list[str]:
    calls = []

    class RecordingLock:
        def acquire(self):
            calls.append("acquire")

        def release(self):
            calls.append("release")

    with monkeypatch.context() as patched:
        patched.setattr(segments, "Lock", RecordingLock)
        segments.fence_by_lock()
    return calls


def message_passing(writer: list[str], reader: list[str]) -> bool:
    """Return True if a member can see a count and, after it, not the data that were written before it."""
    sends = [store("data"), *lock_calls(writer, 0), store("count")]
    receives = [load("count"), *lock_calls(reader, 1), load("data")]
    return ((), (1, 0)) in outcomes(sends, receives)


def slot_reused(reader: list[str], owner: list[str]) -> bool:
    """Return True if a member can read the next chunk from a slot although it counted the slot as read."""
    reads = [load("data"), *lock_calls(reader, 0), store("consumed")]
    reuses = [load("consumed"), *lock_calls(owner, 1), store("data")]
    return ((1,), (1,)) in outcomes(reads, reuses)


@pytest.mark.parametrize("goes_wrong", [message_passing, slot_reused])
def test_fence_of_locks_orders_what_arm_would_reorder(monkeypatch, goes_wrong):
    fence = calls_of_the_fence(monkeypatch)
    assert not goes_wrong(fence, fence)
    assert goes_wrong([], [])
    assert goes_wrong([], fence)


def test_count_that_was_made_before_leaving_is_seen_by_whoever_sees_the_leaving(monkeypatch):
    fence = calls_of_the_fence(monkeypatch)
    for order, can_be_missed in ((fence, False), ([], True)):
        leaves = [store("count"), *lock_calls(order, 0), store("left")]
        looks = [load("left"), *lock_calls(order, 1), load("count")]
        assert (((), (1, 0)) in outcomes(leaves, looks)) is can_be_missed


# --- the reducers, with every access recorded -------------------------------------------------------------------


class RecordedCounters:
    """The counters and the table of a segment, as one member accesses them."""

    def __init__(self, counters, detector: RaceDetector, member: int, owner: int) -> None:
        self.plain = counters
        self._detector = detector
        self._member, self._owner = member, owner

    def __getitem__(self, index: int) -> int:
        value = self.plain[index]
        if index >= segments.TABLE:
            self._detector.read(self._member, ("table", self._owner, index), "reads")
        else:
            self._detector.count_loaded(self._member, self._owner, index, value)
        return value

    def __setitem__(self, index: int, value: int) -> None:
        if index >= segments.TABLE:
            self._detector.written(self._member, ("table", self._owner, index), "writes")
        else:
            self._detector.count_stored(self._member, index, value)
        self.plain[index] = value

    def release(self) -> None:
        self.plain.release()


class RecordedReducer(SharedMemoryReducer):
    """Reports its accesses to chunks."""

    def __init__(self, detector: RaceDetector, rank: int, own: OwnSegment, peers: list[Peer]) -> None:
        owner = SimpleNamespace(round=1, rank=rank, check_alive=lambda: None, report_stall=lambda begins: None)
        super().__init__(own, peers, owner)
        self.detector = detector

    def _view(self, segment, rank, offset, code, dtype):
        if rank < 0:
            self.detector.written(self._rank, ("chunk", self._rank, offset), "writes")
        else:
            self.detector.read(self._rank, ("chunk", rank, offset), "reads")
        return super()._view(segment, rank, offset, code, dtype)

    def can_be_read(self, work) -> bool:
        """Return True if `wait` would not block; looks at the counters without a record."""
        due = self._base + work.end
        return all(peer.counters.plain[ARRIVED] >= due for peer in self._peers)


def races(members: int, seed: int, monkeypatch, without: str = "") -> list[str]:
    """Reduce in a random order of the members' turns, with no fence in the function `without`; return the races."""
    detector, chance = RaceDetector(), random.Random(seed)
    turn = 0

    def fence() -> None:
        if sys._getframe(1).f_code.co_name != without:
            detector.fence(turn)

    for module in (segments, reducer):
        monkeypatch.setattr(module, "fence", fence)
    owned = [OwnSegment() for _ in range(members)]
    for rank, own in enumerate(owned):
        own.identify(bytes([rank + 1] * 32))
        own.reset(1)
        own.small._end = own.small._next  # few slots, each used many times
    reducers = []
    for rank, own in enumerate(owned):
        peers = [
            Peer(r, os.getpid(), other.descriptor, bytes([r + 1] * 32)) for r, other in enumerate(owned) if r != rank
        ]
        for peer in peers:
            peer.counters = RecordedCounters(peer.counters, detector, rank, peer.rank)
        reducers.append(RecordedReducer(detector, rank, own, peers))
    for rank, own in enumerate(owned):
        own.counters = RecordedCounters(own.counters, detector, rank, rank)
    steps, launched, flying = 60, [0] * members, [[] for _ in range(members)]
    try:
        while any(launched[r] < steps or flying[r] for r in range(members)):
            turn = chance.randrange(members)
            if launched[turn] < steps and len(flying[turn]) < 4 and chance.random() < 0.6:
                tensor = torch.full((1000,), float(turn + launched[turn]))
                flying[turn].append((reducers[turn].allreduce(tensor, ReduceOp.SUM), tensor, launched[turn]))
                launched[turn] += 1
            elif flying[turn]:
                work, tensor, step = flying[turn][0]
                if reducers[turn].can_be_read(work) and chance.random() < 0.5:
                    reducers[turn].wait(work)
                elif not work.is_completed():
                    continue
                assert tensor.unique().tolist() == [sum(step + rank for rank in range(members))]
                del flying[turn][0]
        assert all(own.counters.plain[CONSUMED] & 0xFFFF == steps for own in owned)
    finally:
        for turn in range(members):
            reducers[turn].close()
    return detector.races


@pytest.mark.parametrize("members", [2, 3])
def test_every_access_to_a_peers_memory_is_ordered_by_fences(members, monkeypatch):
    for seed in range(5):
        assert races(members, seed, monkeypatch) == []


@pytest.mark.parametrize("without", ["announce", "_wait_until", "_reclaim"])
def test_detector_finds_each_fence_that_is_left_out(without, monkeypatch):
    assert any(races(3, seed, monkeypatch, without) for seed in range(5))
