"""Waiting for a peer's word: spinning for a moment, then asleep, and noticing that it will never come."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from spark_elastic import clock
from spark_elastic.collective.joining import STALL_S
from spark_elastic.collective.shared_memory.segment import LEFT, PeerSegment, futex_wait, futex_wake
from spark_elastic.errors import HorovodInternalError

SPIN_S = 100e-6
"""About what a sleep and its wake-up cost. Longer would take the core from a peer that needs it to compute."""
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.5e-3, 20e-3


class Peer:
    """A member on this host: its segment, and whether its process lives."""

    def __init__(self, rank: int, pid: int, segment: PeerSegment) -> None:
        self.rank = rank
        self.segment = segment
        self.words = segment.words
        try:
            self._process = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._process = -1

    def is_dead(self) -> bool:
        if self._process < 0:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        descriptor, self._process = self._process, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.segment.unmap()


class Waiting:
    """How one member waits for the others.

    Args:
        check: raises if the round is over.
        stalled: called once for each wait that takes longer than `STALL_S`.
        blocked: told when such a long wait begins and ends.
    """

    def __init__(self, check: Callable[[], None], stalled: Callable[[], None], blocked: Callable[[bool], None]) -> None:
        self._check = check
        self._stalled = stalled
        self._blocked = blocked
        self._asleep_on = 0
        self.meanwhile: Callable[[], None] = _nothing
        """Called now and then while asleep."""

    def until(self, peer: Peer, word: int, target: int) -> None:
        """Return as soon as the peer's word has reached `target`.

        Raises: HorovodInternalError: it has left or died, or the round is over.
        """
        words = peer.words
        if words[word] >= target:
            return
        give_up = clock.monotonic() + SPIN_S
        while clock.monotonic() < give_up:
            for _ in range(4):
                if words[word] >= target:
                    return
            os.sched_yield()
        self._sleep_until(peer, word, target)

    def _sleep_until(self, peer: Peer, word: int, target: int) -> None:
        words = peer.words
        address = peer.segment.word_address(word)
        nap, stall_at, stalled = _SHORTEST_NAP_S, clock.monotonic() + STALL_S, False
        try:
            while (value := words[word]) < target:
                self._asleep_on = address
                self._check()
                if words[LEFT] and words[word] < target:
                    raise HorovodInternalError(f"a collective failed: rank {peer.rank} has left the round")
                futex_wait(address, value, nap)
                self.meanwhile()
                if nap > _SHORTEST_NAP_S and peer.is_dead() and words[word] < target:
                    raise HorovodInternalError(f"a collective failed: the process of rank {peer.rank} is gone")
                nap = min(2 * nap, _LONGEST_NAP_S)
                if not stalled and clock.monotonic() >= stall_at:
                    stalled = True
                    self._stalled()
                    self._blocked(True)
        finally:
            self._asleep_on = 0
            if stalled:
                self._blocked(False)

    def interrupt(self) -> None:
        """Have who sleeps look at the round again; from any thread."""
        if self._asleep_on:
            futex_wake(self._asleep_on)


def _nothing() -> None:
    """There is nothing to do while waiting."""
