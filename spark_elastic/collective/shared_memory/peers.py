"""The members of a group on this host: find their segments, and wait for the words in them.

A process id and a descriptor's number do not identify a member: the same host address can belong to containers that
cannot see each other's processes. So each member writes an identity into its own segment that only members of the job
can compute, from a nonce drawn for this occasion, and checks the identities in the segments of the others. The segments
are used only if every member has found all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import select
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective.devices import AUTO, GLOO, REDUCTION_SETTING, SHARED, reduction_setting
from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.joining import STALL_S
from spark_elastic.collective.shared_memory.segment import (
    ARRIVED,
    CONSUMED,
    FUTEX_AVAILABLE,
    LEFT,
    REDUCED,
    OwnSegment,
    PeerSegment,
    futex_wait,
    futex_wake,
)
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.wire.worker_link import WorkerLink

log = logging.getLogger("spark_elastic.collective")

SPIN_S = 100e-6
"""About the cost of a sleep and its wake-up. A longer spin takes the core from a peer that needs it to compute."""
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.5e-3, 20e-3
_warned = False


class Peer:
    """Another member on this host: its segment, and whether its process lives."""

    def __init__(self, rank: int, pid: int, segment: PeerSegment) -> None:
        self.rank = rank
        """Its rank among the members on this host."""
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


# --- finding them -----------------------------------------------------------------------------------


class _Announcement(NamedTuple):
    """A member's message to the others. `pid` is 0 if the member has no segment."""

    pid: int
    descriptor: int
    cores: int
    demanded: int
    nonce: bytes


_ANNOUNCEMENT = struct.Struct("<QQQQ32s")


@dataclass(slots=True)
class HostPeers:
    """This member's segment, and the other members on its host."""

    own: OwnSegment
    rank: int
    """This member's rank among those on its host."""
    peers: list[Peer]
    cores: int
    """The smallest number of cores that any of them may use."""
    demanded: bool
    """All members of the group are set to use shared memory even where it may be slower."""

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.own.close()


def find_peers(group: GlooGroup, link: WorkerLink, hosts: Sequence[str]) -> HostPeers | None:
    """Open the segments of the group's members on this host; return None if any member of the group cannot.

    All members of the connected group call this together, and get peers or None alike.

    Args:
        group: connects the members.
        link: derives the key of the job.
        hosts: the members' hosts, in the order of their ranks.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the setting demands shared memory, which is impossible here.
    """
    wanted = reduction_setting()
    own: OwnSegment | None = None
    why = ""
    if wanted == GLOO:
        why = f"{REDUCTION_SETTING}=gloo"
    elif not FUTEX_AVAILABLE:
        why = "it needs Linux on x86-64"
    else:
        try:
            own = OwnSegment()
        except (OSError, AttributeError, ValueError) as error:
            why = f"no memory to share could be made: {error}"
    found: HostPeers | None = None
    try:
        here = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
        identities = _Identities(link, group, here)
        if own is not None:
            identities.identify(own)
        everyone = _exchange(group, own, identities.nonce, wanted == SHARED)
        if own is not None and all(announced.pid for announced in everyone):
            try:
                cores = min(everyone[rank].cores for rank in here)
                demanded = all(announced.demanded for announced in everyone)
                found = HostPeers(own, here.index(group.rank), identities.open(everyone), cores, demanded)
            except (OSError, ValueError) as error:
                why = f"another worker's memory cannot be opened: {error}"
        if _all_agree(group, found is not None):
            return found
    except BaseException:
        _close(own, found)
        raise
    _close(own, found)
    why = why or "another worker cannot"
    if wanted == SHARED:
        raise UsageError(f"{REDUCTION_SETTING}=shared, but workers cannot share memory: {why}")
    if wanted == AUTO:
        _warn(why)
    return None


def first_count(round: int) -> int:
    """Return the number that all counts of a round begin with, so that a count of another round is recognised."""
    return (round & 0xFFFFFF) << 40


class _Identities:
    """The identities that are written into segments, and checked in those of others.

    Args:
        link: derives the key of the job.
        group: the group, for its round, name and rank.
        here: the group's ranks on this host.
    """

    def __init__(self, link: WorkerLink, group: GlooGroup, here: list[int]) -> None:
        self.nonce = os.urandom(32)
        self._key = link.derive_key("shared memory")
        self._group = group
        self._here = here

    def identify(self, own: OwnSegment) -> None:
        """Write this member's identity, and initialise the counts."""
        own.write(0, self._identity(self._group.rank, self.nonce))
        for word in (ARRIVED, REDUCED, CONSUMED):
            own.words[word] = first_count(self._group.round)

    def open(self, everyone: list[_Announcement]) -> list[Peer]:
        """Open the segments of the others on this host.

        Raises:
            OSError: one cannot be opened.
            ValueError: one does not belong to the member.
        """
        peers: list[Peer] = []
        try:
            for local_rank, rank in enumerate(self._here):
                if rank == self._group.rank:
                    continue
                other = everyone[rank]
                segment = PeerSegment(other.pid, other.descriptor)
                if not hmac.compare_digest(segment.read(0, 32), self._identity(rank, other.nonce)):
                    raise ValueError(f"process {other.pid} is not rank {rank} here")
                peers.append(Peer(local_rank, other.pid, segment))
        except BaseException:
            for peer in peers:
                peer.close()
            raise
        return peers

    def _identity(self, rank: int, nonce: bytes) -> bytes:
        text = f"{self._group.round} {self._group.name} {rank} ".encode()
        return hmac.digest(self._key, text + nonce, hashlib.sha256)


def _exchange(group: GlooGroup, own: OwnSegment | None, nonce: bytes, demanded: bool) -> list[_Announcement]:
    pid, descriptor = (os.getpid(), own.descriptor) if own is not None else (0, 0)
    cores = len(os.sched_getaffinity(0)) if own is not None else 0
    packed = _ANNOUNCEMENT.pack(pid, descriptor, cores, demanded, nonce)
    mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    everyone = torch.empty(group.size * mine.numel(), dtype=torch.uint8)
    group.wait(group.allgather(everyone, mine))
    return [_Announcement(*fields) for fields in _ANNOUNCEMENT.iter_unpack(everyone.numpy().tobytes())]


def _all_agree(group: GlooGroup, mine: bool) -> bool:
    token = torch.tensor([mine], dtype=torch.uint8)
    group.wait(group.allreduce(token, dist.ReduceOp.MIN))
    return bool(token.item())


def _close(own: OwnSegment | None, found: HostPeers | None) -> None:
    if found is not None:
        found.close()
    elif own is not None:
        own.close()


def _warn(why: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "workers on this host add up gradients through its network interface, not through memory: %s; run them as "
            "one user who sees their processes (one container, or a shared process id namespace), or set %s=gloo",
            why,
            REDUCTION_SETTING,
        )


# --- waiting for them -------------------------------------------------------------------------------


class SpinWait:
    """Waits for a peer's word: spins for a moment, then sleeps, and notices when the word will never come.

    Args:
        check: raises if the round is over.
        report_stall: called with True when a wait takes longer than `STALL_S`, and with False when that wait ends.
        meanwhile: does other work; called after each nap of a wait.
    """

    def __init__(
        self, check: Callable[[], None], report_stall: Callable[[bool], None], meanwhile: Callable[[], None]
    ) -> None:
        self._check = check
        self._report_stall = report_stall
        self._meanwhile = meanwhile
        self._asleep_on = 0

    def until(self, peer: Peer, word: int, target: int) -> None:
        """Return as soon as the peer's word has reached `target`.

        Raises:
            HorovodInternalError: the peer has left or died, or the round is over.
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
                self._meanwhile()
                if nap > _SHORTEST_NAP_S and peer.is_dead() and words[word] < target:
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
