"""A connection through Gloo that a group makes at its first collective that needs it, while its thread does other work.

The first such collective starts a thread that connects the members; until it has, collectives are kept and launched by
that thread afterwards, in their order. So a launch never waits for another member, just as if the group had been
connected before. See docs/decisions/gloo-connects-when-it-is-needed.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class LateWork:
    """A collective that is launched once the members are connected. It has the methods of Gloo's works.

    Args:
        name: the method of the process group that launches it.
        args: its arguments.
    """

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self._call: tuple[str, tuple[Any, ...]] | None = (name, args)
        self._begun = threading.Event()
        """Set once it was launched, or has failed."""
        self._work: dist.Work | None = None
        self._error: BaseException | None = None

    def begin(self, launch: Callable[..., dist.Work]) -> None:
        """Launch it: `launch(name, *args)`; an error is kept for those who wait for it."""
        assert self._call is not None
        (name, args), self._call = self._call, None
        try:
            self._work = launch(name, *args)
        except BaseException as error:  # raised in `wait`
            self._error = error
        self._begun.set()

    def fail(self, error: BaseException) -> None:
        """Let those who wait for it get an error; it is never launched."""
        self._call, self._error = None, error
        self._begun.set()

    def has_begun(self, within_s: float = 0.0) -> bool:
        """Wait until it is launched, or has failed, for at most `within_s`; return True if it is."""
        return self._begun.wait(within_s)

    def is_completed(self) -> bool:
        if not self._begun.is_set():
            return False
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until it is done.

        Raises:
            RuntimeError: `timeout` has passed, or the error of Gloo.
            HorovodInternalError: the members could not be connected.
        """
        if not self._begun.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"the members were not connected within {timeout}")
        if self._error is not None:
            raise self._error
        assert self._work is not None
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)


class LateConnection:
    """The connection of one group. One thread launches; `end` may be called from any thread.

    Args:
        connect: connects the members; it waits until all of them have come to it.
        launch: launches a collective of a connected group: `launch(name, *args)`.
    """

    def __init__(self, connect: Callable[[], None], launch: Callable[..., dist.Work]) -> None:
        self._connect = connect
        self._launch = launch
        self._lock = threading.Lock()
        self._waiting: list[LateWork] = []
        """The collectives to launch once the members are connected."""
        self._is_connected = False
        self._has_begun = False
        self._failure: BaseException | None = None

    @property
    def is_under_way(self) -> bool:
        """True from the first launch until the members are connected."""
        return self._has_begun and not self._is_connected

    def launch(self, name: str, *args: Any) -> Any:
        """Launch a collective now, or once the members are connected; return its work.

        Raises:
            HorovodInternalError: they could not be connected, or the round is over.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_connected:
                return self._launch(name, *args)
            work = LateWork(name, args)
            self._waiting.append(work)
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._run, name="spark-elastic-connect-late", daemon=True).start()
            return work

    def check(self, work: LateWork, check: Callable[[], None]) -> None:
        """Call `check` unless the collective was launched; it must not be launched meanwhile."""
        with self._lock:
            if not work.has_begun():
                check()

    def end(self, error: BaseException) -> None:
        """Let all collectives fail that were not launched, and those to come; harmless once connected."""
        with self._lock:
            if not self._is_connected:
                self._fail(error)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._connect()
        except BaseException as error:  # raised to those who wait
            failure = error
        with self._lock:
            if failure is not None:
                self._fail(failure)
            elif self._failure is None:
                for work in self._waiting:
                    work.begin(self._launch)
                self._waiting.clear()
                self._is_connected = True

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for work in self._waiting:
            work.fail(self._failure)
        self._waiting.clear()
