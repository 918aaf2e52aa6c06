"""How the members of a host find one another's segments, and prove that they have.

A process id and a descriptor's number say nothing by themselves: the same host address can belong to containers that
cannot see each other's processes. So each member writes into its own segment an identity that only members of the job
can compute, reads that of the others, and leaves a proof for each that it has. Only if every member has found the
proofs of all others, all of them use the segments; otherwise none does.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import struct
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spark_elastic.collective import futex
from spark_elastic.collective.host_group import HostGroup
from spark_elastic.collective.host_waiting import Peer, Waiting
from spark_elastic.collective.segment import (
    ARRIVED,
    CONSUMED,
    MOST_MEMBERS,
    REDUCED,
    OwnSegment,
    PeerSegment,
    proof_at,
)
from spark_elastic.errors import InvalidSettingsError, UsageError

if TYPE_CHECKING:
    from spark_elastic.collective.gloo import GlooGroup
    from spark_elastic.worker_link import WorkerLink

log = logging.getLogger("spark_elastic.collective")

SETTING = "SPARK_ELASTIC_REDUCTION"
AUTO, GLOO, SHARED = "auto", "gloo", "shared"

_ANNOUNCED = struct.Struct("<QQQ32s")
_warned = False


def setting() -> str:
    """What the environment asks for. Raises: InvalidSettingsError."""
    value = os.environ.get(SETTING, AUTO)
    if value not in (AUTO, GLOO, SHARED):
        raise InvalidSettingsError(f"{SETTING}={value}: it is auto, gloo or shared")
    return value


def meet(group: GlooGroup, link: WorkerLink) -> HostGroup | None:
    """The way through memory for a connected group whose members are all on one host; None: there is none.

    All members call this together, and all get a group or none does.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the setting demands what is impossible here.
    """
    wanted = setting()
    own: OwnSegment | None = None
    why = ""
    if wanted == GLOO:
        why = f"{SETTING}=gloo"
    elif not futex.AVAILABLE:
        why = "it needs Linux on x86-64"
    elif group.size > MOST_MEMBERS:
        why = f"more than {MOST_MEMBERS} workers share a host"
    else:
        try:
            own = OwnSegment()
        except (OSError, AttributeError, ValueError) as error:
            why = f"no memory to share could be made: {error}"
    peers: list[Peer] = []
    try:
        nonce = os.urandom(32)
        prover = _Prover(link, group, nonce)
        if own is not None:
            prover.identify(own)
        everyone = _exchange(group, own, nonce)
        if own is not None and all(pid for pid, _, _ in everyone):
            try:
                peers = prover.open(everyone, own)
            except (OSError, ValueError) as error:
                why = f"another worker's memory cannot be opened: {error}"
        complete = len(peers) == group.size - 1
        if _all_agree(group, complete) and _all_agree(group, own is not None and prover.is_seen(peers)):
            assert own is not None
            waiting = Waiting(group.check_alive, group.log.stalled, link.blocked)
            return HostGroup(own, group.rank, peers, _base(group.round), waiting)
    except BaseException:
        _drop(own, peers)
        raise
    _drop(own, peers)
    if wanted == SHARED:
        raise UsageError(f"{SETTING}=shared, but workers cannot share memory: {why or 'another worker cannot'}")
    if wanted == AUTO:
        _warn(why or "another worker cannot")
    return None


class _Prover:
    def __init__(self, link: WorkerLink, group: GlooGroup, nonce: bytes) -> None:
        self._key = link.derive_key("shared memory")
        self._group = group
        self._nonce = nonce

    def identify(self, own: OwnSegment) -> None:
        """Write who this is, and let the counts begin."""
        own.write(0, self._identity(self._group.rank, self._nonce))
        for word in (ARRIVED, REDUCED, CONSUMED):
            own.words[word] = _base(self._group.round)

    def open(self, everyone: list[tuple[int, int, bytes]], own: OwnSegment) -> list[Peer]:
        """All other segments, in rank order. Raises: OSError, ValueError: one is not what it should be."""
        peers: list[Peer] = []
        try:
            for rank, (pid, descriptor, nonce) in enumerate(everyone):
                if rank == self._group.rank:
                    continue
                segment = PeerSegment(pid, descriptor)
                if not hmac.compare_digest(segment.read(0, 32), self._identity(rank, nonce)):
                    raise ValueError(f"process {pid} is not rank {rank} here")
                own.write(proof_at(rank), self._proof(self._group.rank, rank, nonce))
                peers.append(Peer(rank, pid, segment))
        except BaseException:
            for peer in peers:
                peer.close()
            raise
        return peers

    def is_seen(self, peers: list[Peer]) -> bool:
        """Whether all of them have opened this process's segment."""
        me = self._group.rank
        return all(
            hmac.compare_digest(peer.segment.read(proof_at(me), 32), self._proof(peer.rank, me, self._nonce))
            for peer in peers
        )

    def _identity(self, rank: int, nonce: bytes) -> bytes:
        return self._mac(f"identity {rank}", nonce)

    def _proof(self, reader: int, owner: int, nonce: bytes) -> bytes:
        return self._mac(f"rank {reader} has read rank {owner}", nonce)

    def _mac(self, what: str, nonce: bytes) -> bytes:
        text = f"{self._group.round} {self._group.name} {what} ".encode()
        return hmac.digest(self._key, text + nonce, hashlib.sha256)


def _exchange(group: GlooGroup, own: OwnSegment | None, nonce: bytes) -> list[tuple[int, int, bytes]]:
    """Process id (0: it has no segment), descriptor and nonce of every member."""
    pid, descriptor = (os.getpid(), own.descriptor) if own is not None else (0, 0)
    mine = torch.frombuffer(bytearray(_ANNOUNCED.pack(pid, descriptor, 0, nonce)), dtype=torch.uint8)
    everyone = torch.empty(group.size * mine.numel(), dtype=torch.uint8)
    group.wait(group.allgather(everyone, mine))
    return [(pid, fd, nonce) for pid, fd, _, nonce in _ANNOUNCED.iter_unpack(everyone.numpy().tobytes())]


def _all_agree(group: GlooGroup, mine: bool) -> bool:
    token = torch.tensor([mine], dtype=torch.uint8)
    group.wait(group.allreduce(token, dist.ReduceOp.MIN))
    return bool(token.item())


def _drop(own: OwnSegment | None, peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()
    if own is not None:
        own.close()


def _base(round: int) -> int:
    return (round & 0xFFFFFF) << 40


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
