"""Let a worker keep the memory that it frees.

Gradients and an optimizer's intermediate results are allocated and freed in each step. glibc returns large blocks to
the kernel, which clears them page by page when they are used again, in the next step. That can take a third of a step.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3)."""
_KEPT_BYTES = 1 << 30
"""A process keeps the free end of its heap up to this size, and returns all of it beyond."""
_LARGEST_BYTES, _LARGEST_OF_OLD_GLIBC = 256 << 20, 32 << 20
"""Larger blocks are mapped one by one, and returned when they are freed."""
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> None:
    """Keep freed blocks of up to 256 MiB for the next allocation.

    Nothing is changed without glibc, or if its environment variables say already what to do (``MALLOC_...`` or
    ``GLIBC_TUNABLES``). To set one threshold ends glibc's own adjustment of both, so both are set.
    """
    environment = os.environ
    if any(name in environment for name in _OWN_SETTINGS) or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return
    if any(libc.mallopt(_M_MMAP_THRESHOLD, each) for each in (_LARGEST_BYTES, _LARGEST_OF_OLD_GLIBC)):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return what this process has freed to the kernel, before it needs one large block; does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
