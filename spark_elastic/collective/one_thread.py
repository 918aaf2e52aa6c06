"""Collectives are for one thread at a time: Gloo and the comparison of calls would crash or wait for ever."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from spark_elastic.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class OneThread:
    """A context that one thread of the process may be in, any number of times.

    Threads that Python has not started, such as those of autograd and TensorFlow, are let in at any time: their
    frameworks keep the order of what they call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self.inside: threading.Thread | None = None
        """The thread that is inside."""

    def __enter__(self) -> None:
        me = threading.current_thread()
        if self.inside is not me:
            if not self._lock.acquire(blocking=False):
                other = self.inside
                if isinstance(me, threading._DummyThread) or isinstance(other, threading._DummyThread):
                    return
                raise UsageError(
                    f"collectives were called in two threads at the same time ({me.name} and "
                    f"{other.name if other is not None else 'another one'}); call them in one thread, or one after the "
                    "other"
                )
            self.inside = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self.inside is not threading.current_thread():
            return
        self._depth -= 1
        if not self._depth:
            self.inside = None
            self._lock.release()


one_thread = OneThread()


def in_one_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise UsageError while another thread is in such a function."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with one_thread:
            return function(*args, **kwargs)

    return wrapper
