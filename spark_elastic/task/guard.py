"""Ends what a worker's function has started, when the worker is gone and there is no agent left to do it.

The kernel kills a worker with its agent, but not the worker's own children: a data loader's processes would go on for
seconds, a program of the user's for ever. So each worker has one small process in its group that waits for its end and
then kills the group. It is forked before anything but the standard library is imported.
"""

from __future__ import annotations

import os
import select
import signal
import time

_POLL_S = 0.2


def guard_group() -> None:
    """Start the guard of this process's group. The caller leads the group and has no threads yet."""
    worker = os.getpid()
    between = os.fork()
    if between != 0:
        os.waitpid(between, 0)
        return
    try:
        if os.fork() == 0:  # a grandchild, so that a function that waits for all its children does not wait for this
            _let_go_of_everything()
            _wait_for(worker)
            os.killpg(worker, signal.SIGKILL)  # this process is in the group, so its number is nobody else's by now
    finally:
        os._exit(0)


def _let_go_of_everything() -> None:
    """Signals are meant for the worker, and its pipes have to break when it dies."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in _open_descriptors():
        try:
            os.close(descriptor)
        except OSError:
            pass  # it was open for the listing alone


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return list(range(256))


def _wait_for(worker: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            select.select([os.pidfd_open(worker)], [], [])
            return
        except OSError:
            pass  # it is gone already, or the kernel is too old
    while _exists(worker):
        time.sleep(_POLL_S)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
