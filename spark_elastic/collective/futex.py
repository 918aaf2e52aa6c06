"""Sleeping until somebody changes a word in memory that processes share, and waking who sleeps (futex(2))."""

from __future__ import annotations

import ctypes
import platform
import sys

AVAILABLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
"""Whether words in shared memory can be used from Python here.

A plain store followed by a plain load on another core is seen in order on x86-64 without a fence. On machines of other
kinds it is not, and Python has no fence.
"""

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if AVAILABLE:
    _argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    _sleeping = ctypes.CDLL(None).syscall  # other threads run meanwhile
    _sleeping.argtypes = _argtypes
    _at_once = ctypes.PyDLL(None).syscall  # returns in a microsecond: not worth letting go of Python's lock
    _at_once.argtypes = _argtypes


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until woken, at most so long; not at all if the 32-bit word at `address` is not `value`.

    The word and the sleep are one step to the kernel: who stores first and wakes then, is never missed.
    """
    seconds = int(timeout_s)
    limit = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    _sleeping(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake everybody who sleeps on this word, in any process. Cheap if nobody does."""
    _at_once(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None)
