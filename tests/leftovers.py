"""Find threads and descriptors of this package that a test has left behind in this process.

Threads and descriptors of others (earlier tests, Spark, TensorFlow, Python itself) come and go at any time, so
nothing is counted: each is known by its identity, ours by their names, and ours have a while to end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

NAMES = ("spark_elastic", "spark-elastic")
"""What the names of all our threads begin with; tests/unit/test_leftovers.py holds that."""

GONE_S = 10.0

_OF_NOBODY = ("/dev/", "/proc/", "/sys/")  # opened by libraries when they first need them, and kept


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(NAMES)}


def open_descriptors() -> set[tuple[int, str]]:
    """Number and target, such as (7, "socket:[4242]"), of what is open here. Spark's connections to its JVM, which
    garbage collection may open at any time, and devices are not among them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, and what another thread has just closed
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(_OF_NOBODY) and not _leads_to_the_jvm(int(name), target):
                found.add((int(name), target))
    return found


def _leads_to_the_jvm(descriptor: int, target: str) -> bool:
    pyspark = sys.modules.get("pyspark")
    gateway = pyspark.SparkContext._gateway if pyspark else None
    if gateway is None or not target.startswith("socket:"):
        return False
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        peer = connection.getpeername()  # of sockets of a file system, it is a path
        return isinstance(peer, tuple) and peer[1] == gateway.gateway_parameters.port
    return False


def threads_settle(most: int, timeout_s: float = GONE_S) -> None:
    """Give threads of this process a while to end, also those that are not Python's: at most so many are to stay."""
    until = time.monotonic() + timeout_s
    while len(os.listdir("/proc/self/task")) > most and time.monotonic() < until:
        time.sleep(0.01)


class Before:
    """What was there at some moment; later it can say what of ours has come since."""

    def __init__(self) -> None:
        self._threads = our_threads()
        self._descriptors = open_descriptors()

    def threads(self) -> list[str]:
        """Names of our threads that have come since and still run."""
        return sorted(thread.name for thread in our_threads() - self._threads if thread.is_alive())

    def descriptors(self) -> list[str]:
        return sorted(f"{number} -> {target}" for number, target in open_descriptors() - self._descriptors)

    def assert_no_threads_left(self, timeout_s: float = GONE_S) -> None:
        _assert_empty(self.threads, timeout_s)

    def assert_nothing_left(self, timeout_s: float = GONE_S) -> None:
        _assert_empty(lambda: self.threads() + self.descriptors(), timeout_s)


def _assert_empty(left: Callable[[], list[str]], timeout_s: float) -> None:
    if left():
        gc.collect()
    until = time.monotonic() + timeout_s
    while found := left():
        assert time.monotonic() < until, f"still there {timeout_s:g} s after the end: {', '.join(found)}"
        time.sleep(0.01)


@contextlib.contextmanager
def nothing_left(timeout_s: float = GONE_S) -> Iterator[Before]:
    """Once the block has ended, so have the threads of ours that began in it, and what it opened is closed."""
    before = Before()
    yield before
    before.assert_nothing_left(timeout_s)


@contextlib.contextmanager
def no_threads_left(timeout_s: float = GONE_S) -> Iterator[Before]:
    """As `nothing_left`, where others open descriptors of their own meanwhile."""
    before = Before()
    yield before
    before.assert_no_threads_left(timeout_s)
