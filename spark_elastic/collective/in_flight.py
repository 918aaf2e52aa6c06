"""Collectives that were launched and have not been seen to end, and groups that have to be left behind with one.

When a peer is gone, Gloo fails every collective that waits for it, except that it loses the error of a send that its
own thread writes at that moment (`UnboundBuffer::waitSend`, in about one of fifty kills in the middle of an
all-reduce): that collective then waits for its timeout, and the group's destructor waits for the collective, with
Python's lock in its hands. So nobody waits longer than a moment for a group that is over, and a group whose collective
does not end is kept alive until it does.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

log = logging.getLogger("spark_elastic.collective")

GRACE_S = 0.1
"""How long after the end of its group a collective may take to fail. Usually that takes a millisecond."""
_PRUNE_AT = 64


def has_ended(work: dist.Work, within: timedelta) -> bool:
    """Whether it is over, waiting for that at most so long. Raises: what it failed with."""
    try:
        work.wait(within)
    except Exception:
        if not work.is_completed():
            return False
        work.wait()  # that may have been the end of the wait, and the collective ended right after it
    return True


class InFlight:
    """The launched collectives of one group."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def add(self, work: dist.Work) -> None:
        if len(self._works) >= _PRUNE_AT:
            self._works = [known for known in self._works if not known.is_completed()]
        self._works.append(work)

    def discard(self, work: dist.Work) -> None:
        """Forget it, if it is over."""
        if work in self._works and work.is_completed():
            self._works.remove(work)

    def stuck(self) -> list[dist.Work]:
        """Those that do not end although the group's connections were shut down."""
        return [work for work in self._works if not _is_over(work)]


def _is_over(work: dist.Work) -> bool:
    try:
        return has_ended(work, timedelta(seconds=GRACE_S))
    except Exception:
        return True


_left_behind: list[tuple[Any, list[dist.Work]]] = []


def leave_behind(group: Any, stuck: list[dist.Work]) -> None:
    """Keep a process group alive until its collectives have ended."""
    log.warning(
        "Gloo does not let go of %d collectives of a world that is over; their threads stay for now", len(stuck)
    )
    _left_behind.append((group, stuck))


def free_those_that_ended() -> None:
    """Let go of the groups left behind whose collectives have ended meanwhile."""
    _left_behind[:] = [kept for kept in _left_behind if not all(work.is_completed() for work in kept[1])]
