"""How the members of a host find one another's segments, and prove that they have.

A process id and a descriptor's number say nothing by themselves: the same host address can belong to containers that
cannot see each other's processes. So each member writes into its own segment an identity that only members of the job
can compute, of a number drawn for this occasion, and looks for those of the others in theirs. Only if every member has
found all of them, all use the segments; otherwise none does.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic.collective.shared_memory.segment import (
    ARRIVED,
    CONSUMED,
    FUTEX_AVAILABLE,
    REDUCED,
    OwnSegment,
    PeerSegment,
)
from spark_elastic.collective.shared_memory.spin_wait import Peer
from spark_elastic.errors import InvalidSettingsError, UsageError

if TYPE_CHECKING:
    from spark_elastic.collective.gloo import GlooGroup
    from spark_elastic.wire.worker_link import WorkerLink

log = logging.getLogger("spark_elastic.collective")

SETTING = "SPARK_ELASTIC_REDUCTION"
AUTO, GLOO, SHARED = "auto", "gloo", "shared"


class Announced(NamedTuple):
    """What a member says of itself. pid: 0: it has no segment."""

    pid: int
    descriptor: int
    cores: int
    demanded: int
    nonce: bytes


_ANNOUNCED = struct.Struct("<QQQQ32s")
_warned = False


def setting() -> str:
    """What the environment asks for. Raises: InvalidSettingsError."""
    value = os.environ.get(SETTING, AUTO)
    if value not in (AUTO, GLOO, SHARED):
        raise InvalidSettingsError(f"{SETTING}={value}: it is auto, gloo or shared")
    return value


@dataclass(slots=True)
class Met:
    """What a member knows of those on its host.

    rank: its own among them. cores: the fewest that any of them may use. demanded: whether all members of the group
    are set to reduce through memory even where it may be slower.
    """

    own: OwnSegment
    rank: int
    peers: list[Peer]
    cores: int
    demanded: bool

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.own.close()


def meet(group: GlooGroup, link: WorkerLink, hosts: Sequence[str]) -> Met | None:
    """Find the members on this host that a connected group can share memory with; None: some cannot.

    All members of the group call this together, and all of them can or none does.

    Args:
        hosts: of the members, in the order of their ranks.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the setting demands what is impossible here.
    """
    wanted = setting()
    own: OwnSegment | None = None
    why = ""
    if wanted == GLOO:
        why = f"{SETTING}=gloo"
    elif not FUTEX_AVAILABLE:
        why = "it needs Linux on x86-64"
    else:
        try:
            own = OwnSegment()
        except (OSError, AttributeError, ValueError) as error:
            why = f"no memory to share could be made: {error}"
    met: Met | None = None
    try:
        here = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
        identities = _Identities(link, group, here)
        if own is not None:
            identities.identify(own)
        everyone = _exchange(group, own, identities.nonce)
        if own is not None and all(announced.pid for announced in everyone):
            try:
                cores = min(everyone[rank].cores for rank in here)
                demanded = all(announced.demanded for announced in everyone)
                met = Met(own, here.index(group.rank), identities.open(everyone), cores, demanded)
            except (OSError, ValueError) as error:
                why = f"another worker's memory cannot be opened: {error}"
        if _all_agree(group, met is not None):
            return met
    except BaseException:
        _drop(own, met)
        raise
    _drop(own, met)
    if wanted == SHARED:
        raise UsageError(f"{SETTING}=shared, but workers cannot share memory: {why or 'another worker cannot'}")
    if wanted == AUTO:
        _warn(why or "another worker cannot")
    return None


def base(round: int) -> int:
    """What all counts of a round begin with."""
    return (round & 0xFFFFFF) << 40


class _Identities:
    """What is written into segments, and looked for in those of others. here: the group's ranks on this host."""

    def __init__(self, link: WorkerLink, group: GlooGroup, here: list[int]) -> None:
        self.nonce = os.urandom(32)
        self._key = link.derive_key("shared memory")
        self._group = group
        self._here = here

    def identify(self, own: OwnSegment) -> None:
        """Write who this is, and let the counts begin."""
        own.write(0, self._identity(self._group.rank, self.nonce))
        for word in (ARRIVED, REDUCED, CONSUMED):
            own.words[word] = base(self._group.round)

    def open(self, everyone: list[Announced]) -> list[Peer]:
        """The segments of the others here. Raises: OSError, ValueError: one is not what it should be."""
        peers: list[Peer] = []
        try:
            for place, rank in enumerate(self._here):
                if rank == self._group.rank:
                    continue
                other = everyone[rank]
                segment = PeerSegment(other.pid, other.descriptor)
                if not hmac.compare_digest(segment.read(0, 32), self._identity(rank, other.nonce)):
                    raise ValueError(f"process {other.pid} is not rank {rank} here")
                peers.append(Peer(place, other.pid, segment))
        except BaseException:
            for peer in peers:
                peer.close()
            raise
        return peers

    def _identity(self, rank: int, nonce: bytes) -> bytes:
        text = f"{self._group.round} {self._group.name} {rank} ".encode()
        return hmac.digest(self._key, text + nonce, hashlib.sha256)


def _exchange(group: GlooGroup, own: OwnSegment | None, nonce: bytes) -> list[Announced]:
    pid, descriptor = (os.getpid(), own.descriptor) if own is not None else (0, 0)
    cores = len(os.sched_getaffinity(0)) if own is not None else 0
    packed = _ANNOUNCED.pack(pid, descriptor, cores, setting() == SHARED, nonce)
    mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    everyone = torch.empty(group.size * mine.numel(), dtype=torch.uint8)
    group.wait(group.allgather(everyone, mine))
    return [Announced(*fields) for fields in _ANNOUNCED.iter_unpack(everyone.numpy().tobytes())]


def _all_agree(group: GlooGroup, mine: bool) -> bool:
    token = torch.tensor([mine], dtype=torch.uint8)
    group.wait(group.allreduce(token, dist.ReduceOp.MIN))
    return bool(token.item())


def _drop(own: OwnSegment | None, met: Met | None) -> None:
    if met is not None:
        met.close()
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
            SETTING,
        )
