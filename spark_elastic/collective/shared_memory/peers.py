"""Find the other members of a group that run on this host, and open their segments of shared memory.

A process id and a descriptor's number do not identify a member: the same host address can belong to containers that
cannot see each other's processes. So each member draws a nonce for each segment, writes the identity that belongs to it
there, and checks the identities in the segments of the others. The segments are used only if every member has found all
of them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import platform
import struct
import sys
import time
from collections.abc import Sequence

from spark_elastic import clock
from spark_elastic.collective.reduce import AUTO, GLOO, REDUCTION_SETTING, SHARED, GroupContext, reduction_setting
from spark_elastic.collective.shared_memory.segments import FUTEX_AVAILABLE, OwnSegment, Peer
from spark_elastic.errors import UsageError

log = logging.getLogger("spark_elastic.collective")


_ANNOUNCEMENT = struct.Struct("<QQ32s")
"""Struct that locates a member's segment: process id (0: the member has none), file descriptor, nonce."""
_warned = False
_LOOK_AGAIN_S = 0.02
_LOSS_IS_KNOWN_S = 5.0
"""The driver ends a round much sooner after a worker has died. Only an error that ends the job waits for so long."""


def find_peers(group: GroupContext, key: bytes) -> tuple[OwnSegment, list[Peer]] | None:
    """Return this member's segment and those of the other members; None if any of them cannot be opened.

    All members of the group, which alone know the `key`, call this together; all of them get segments or all get None.

    Raises:
        UsageError: the setting demands shared memory, which is impossible here.
    """
    global _warned
    setting = reduction_setting()
    own, why = _make_segment(setting)
    peers: list[Peer] | None = None
    usable = False
    try:
        mine = bytes(_ANNOUNCEMENT.size)
        if own is not None:
            nonce = os.urandom(32)
            own.identify(_identity(key, nonce))
            mine = _ANNOUNCEMENT.pack(os.getpid(), own.descriptor, nonce)
        announced = group.exchange(mine, serve=True)
        if own is not None:
            own.reset(group.round)
            try:
                peers = _open_peers(key, group.rank, [_ANNOUNCEMENT.unpack(each) for each in announced])
            except (OSError, ValueError) as error:
                why = f"another worker's memory cannot be opened: {error}"
        usable = all(any(answer) for answer in group.exchange(bytes([peers is not None]), serve=True))
        if usable and own is not None and peers is not None:
            return own, peers
    finally:
        if not usable:
            for peer in peers or ():
                peer.close()
            if own is not None:
                own.leave()
    why = why or "another worker cannot"
    if setting == SHARED:
        until = clock.monotonic() + _LOSS_IS_KNOWN_S
        while clock.monotonic() < until:
            group.check_alive()  # nor can the memory of a worker be opened that has just died
            time.sleep(_LOOK_AGAIN_S)
        raise UsageError(f"{REDUCTION_SETTING}=shared, but workers cannot share memory: {why}")
    if setting == AUTO and not _warned:
        _warned = True
        log.warning(
            "workers on this host add up gradients through its network interface, not through memory: %s; run them as "
            "one user that sees their processes (one container, or a shared process id namespace), or set %s=gloo",
            why,
            REDUCTION_SETTING,
        )
    return None


def _make_segment(setting: str) -> tuple[OwnSegment | None, str]:
    """Return a new segment; or None, and the reason why there is none."""
    if setting == GLOO:
        return None, f"{REDUCTION_SETTING}=gloo"
    if not FUTEX_AVAILABLE:
        return None, f"it needs Linux on x86-64 or aarch64, and this is {sys.platform} on {platform.machine()}"
    try:
        return OwnSegment(), ""
    except (OSError, AttributeError, ValueError) as error:
        return None, f"no memory to share could be made: {error}"


def _identity(key: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, nonce, hashlib.sha256)


def _open_peers(key: bytes, rank: int, announced: Sequence[tuple[int, int, bytes]]) -> list[Peer]:
    """Open the segments of the other members, as they have announced them, by rank; see `Peer`."""
    peers: list[Peer] = []
    try:
        for number, (pid, descriptor, nonce) in enumerate(announced):
            if not pid:
                raise ValueError(f"rank {number} has none")
            if number != rank:
                peers.append(Peer(number, pid, descriptor, _identity(key, nonce)))
    except BaseException:
        for peer in peers:
            peer.close()
        raise
    return peers
