"""The reaper: a small process beside each worker that reports its death at once, and then kills what it leaves behind.

The kernel kills a worker with its agent (`main.die_with_parent`), but not the worker's own children: the processes of a
data loader would run on for seconds, a program of the user's for ever. So each worker has a reaper in its process
group: it waits for the worker's end and then kills the group.

The worker holds a robust mutex for as long as it lives, in a page that it shares with its reaper, which waits for it
and tells the agent through a pipe: it is released before the memory is (docs/decisions/08-robust-mutex.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

_POLL_S = 0.2
_ENDED = ("Z", "X")
_PROCESS_SHARED, _ROBUST = 1, 1
_MUTEX_BYTES = 128
"""Room for a pthread_mutex_t, which takes 40 or 48 bytes."""
_FLAG_AT = _MUTEX_BYTES
_PR_SET_NAME = 15
_MOST_DESCRIPTORS = 1 << 16
"""More than a worker has when its reaper is forked."""


class LifeMutex:
    """A mutex that the calling thread holds until it dies, and that another process waits for.

    Raises OSError if the system has no robust mutexes between processes.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux releases the mutexes of a process before its memory")
        self._library = ctypes.CDLL(None)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the processes that are forked from now on
        self._mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._page)))
        attributes = (ctypes.c_char * 64)()
        self._call("pthread_mutexattr_init", attributes)
        self._call("pthread_mutexattr_setpshared", attributes, _PROCESS_SHARED)
        self._call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        self._call("pthread_mutex_init", self._mutex, attributes)
        self._call("pthread_mutex_lock", self._mutex)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise OSError(code, f"{function}: {os.strerror(code)}")

    def leave(self) -> None:
        """Record that this process is about to end by itself, from any thread."""
        self._page[_FLAG_AT] = 1

    def wait_for_death(self) -> bool:
        """Wait until the mutex's thread dies; False if its process was ending by itself. Raises OSError."""
        code = self._library.pthread_mutex_lock(self._mutex)
        if code not in (0, errno.EOWNERDEAD):
            raise OSError(code, os.strerror(code))
        return bool(code == errno.EOWNERDEAD and not self._page[_FLAG_AT])


_life: LifeMutex | None = None


def exit_now(code: int, why: str = "") -> NoReturn:
    """Flush the output and end the process, from any thread."""
    if why:
        print(why, file=sys.stderr)
    if _life is not None:
        _life.leave()
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush stdout and stderr. The user's function may have closed them, or set them to None; readers may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def start_reaper(death_fd: int) -> None:
    """Fork the reaper of this process's group.

    The caller is the worker's only thread, and has not imported the user's modules yet, so that the fork is cheap. A
    byte in the pipe `death_fd`, which is closed in this process, tells the agent that the worker dies.
    """
    global _life
    with contextlib.suppress(OSError, AttributeError):
        _life = LifeMutex()
    worker = os.getpid()
    _name_process("elastic-worker")
    between = os.fork()
    if between != 0:
        os.close(death_fd)
        os.waitpid(between, 0)
        return
    try:
        if os.fork() == 0:  # a grandchild: a function that waits for all its children does not wait for the reaper
            _name_process("elastic-reaper")
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):  # they are for the worker
                signal.signal(number, signal.SIG_IGN)
            os.closerange(0, death_fd)  # or else pipes of the worker would stay open after its death
            os.closerange(death_fd + 1, _MOST_DESCRIPTORS)
            if _life is not None:
                with contextlib.suppress(OSError):
                    if _life.wait_for_death():
                        os.write(death_fd, b"!")
            os.close(death_fd)
            _wait_for_end_of(worker)
            # the reaper is in the group, so the group's number has not been given to another one
            os.killpg(worker, signal.SIGKILL)
    finally:
        os._exit(0)


def _name_process(name: str) -> None:
    """Name this process for `pkill` and `top`, in at most 15 characters; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _wait_for_end_of(worker: int) -> None:
    if (pidfd := open_pidfd(worker)) >= 0:
        select.select([pidfd], [], [])
        return
    with contextlib.suppress(ProcessLookupError):
        while process_state(worker) not in _ENDED:  # nobody may wait for a worker whose agent is gone
            os.kill(worker, 0)
            time.sleep(_POLL_S)


def kill_group(pid: int) -> None:
    """SIGKILL a worker and its process group."""
    for kill in (os.killpg, os.kill):  # it may not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 if it is gone or there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # Linux before 5.3, or a seccomp filter of older containers
        return -1


@contextlib.contextmanager
def handling(number: int, action: Any) -> Iterator[None]:
    """Set what a signal does within the block; nothing outside of the main thread, where that is not allowed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def default_child_signal() -> Iterator[None]:
    """Set SIGCHLD to its default within the block if it is ignored, as some supervisors have it.

    Otherwise the exit codes of children are lost. Has no effect outside of the main thread.
    """
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    with handling(signal.SIGCHLD, signal.SIG_DFL) if ignored else contextlib.nullcontext():
        yield


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the process's state on, its third. Raise OSError if there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()  # its second, the name, may have spaces in it


def process_state(pid: int) -> str:
    """Return Linux's letter for the state of a process, as `ps` shows it; "" if it cannot be read."""
    try:
        return stat_of(pid)[0]
    except (OSError, IndexError):
        return ""


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of a process that dies, a negative one for a signal; None if the system does not show it."""
    try:
        return os.waitstatus_to_exitcode(int(stat_of(pid)[49]))
    except (OSError, IndexError, ValueError):
        return None
