"""Handles of collectives that are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.negotiation import Pending


class Handle:
    """A collective that was called, and what turns it into the result.

    Its result can be asked for repeatedly, and so can the error that it ended with.

    Args:
        pending: it is not launched before all members have been seen to call it; None: `works` are launched.
    """

    __slots__ = ("_error", "_finish", "_group", "_pending", "_result", "_works")

    def __init__(
        self,
        group: GlooGroup | None,
        works: Sequence[Any],
        finish: Callable[[], Any] | None,
        pending: Pending | None = None,
    ) -> None:
        self._group = group
        self._works: list[Any] = list(works)
        self._finish: Callable[[], Any] | None = finish
        self._pending = pending
        self._result: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        if self._pending is not None:
            try:
                self._launch()
            except Exception as error:
                self._fail(error)
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            self._launch()
            while self._works:
                assert self._group is not None
                self._group.negotiation.serve_others(self._works[0])
                self._group.wait(self._works[0])
                del self._works[0]
            if self._finish is not None:
                finish, self._finish = self._finish, None
                self._result = finish()
        except Exception as error:
            self._fail(error)
            raise
        return self._result

    def taking(self, part: Callable[[Any], Any]) -> Handle:
        """A handle of the same collective whose result is `part` of this one's. Use one of the two only."""
        return _Part(self, part)

    def _launch(self) -> None:
        if self._pending is not None:
            assert self._group is not None
            works, self._finish = self._group.negotiation.bring(self._pending)
            self._works = list(works)
            self._pending = None

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._works, self._finish, self._pending = [], None, None


class _Part(Handle):
    """What `taking` makes."""

    __slots__ = ("_part", "_whole")

    def __init__(self, whole: Handle, part: Callable[[Any], Any]) -> None:
        super().__init__(None, [], None)
        self._whole = whole
        self._part = part

    def done(self) -> bool:
        return self._whole.done()

    def wait(self) -> Any:
        return self._part(self._whole.wait())


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, without blocking.

    The first time it waits until all members have called this collective, or another one that they wait for.
    """
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective and return its result.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the members have not called the same collective, or not in the same way.
    """
    return handle.wait()
