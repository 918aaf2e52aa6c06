"""Handles of collectives that are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from spark_elastic.collective.gloo import GlooGroup


class Handle:
    """Launched work and what turns it into the result. Its result can be asked for repeatedly."""

    __slots__ = ("_finish", "_group", "_result", "_works")

    def __init__(self, group: GlooGroup | None, works: Sequence[dist.Work], finish: Callable[[], Any]) -> None:
        self._group = group
        self._works: list[dist.Work] = list(works)
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            works, self._works = self._works, []
            for work in works:
                assert self._group is not None
                self._group.wait(work)
            self._result = finish()
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return without blocking."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective and return its result.

    Raises:
        HorovodInternalError: a peer is gone.
    """
    return handle.wait()
