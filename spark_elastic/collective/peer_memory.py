"""Copy tensors out of the memory of another process on the same host, without its help and without a second copy.

The kernel copies from one process to the other (`process_vm_readv`). It permits that to processes of the same user that
could trace each other. A member names the places of its tensors in a `MemoryOffer`, keeps them unchanged, and is told
by a collective when the others have read them.

A process id does not identify a process: the same host address can belong to containers that cannot see each other's
processes. So an offer has a nonce and the address where it is, and is read only if the nonce is found there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

log = logging.getLogger("spark_elastic.collective")

_NONCE_BYTES = 32
_MOST_AT_ONCE = 512
"""The most pieces that are copied by one system call; the kernel allows 1024."""
_MOST_BYTES_AT_ONCE = 8 << 20
"""About a millisecond: between two calls the reader looks whether its round is over."""
_MOST_THREADS = 4
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)


class _Piece(ctypes.Structure):
    """The kernel's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)  # other threads run during its calls
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )


Copied = tuple[int, int, int]
"""A piece of memory to copy: its address here, its address there, and its size."""


class Span(NamedTuple):
    """The place of a tensor in a process's memory.

    Attributes:
        address: The address of its first byte.
        nbytes: Its size.
        strides: Its memory layout, which the reader's tensor must have as well.
    """

    address: int
    nbytes: int
    strides: tuple[int, ...]


class MemoryOffer(NamedTuple):
    """The places of a process's tensors, for other processes on its host.

    Attributes:
        pid: The process.
        nonce: Bytes that no other process knows before it gets the offer.
        nonce_at: The address of the nonce.
        spans: The place of each tensor; None for a tensor that cannot be read in this way.
    """

    pid: int
    nonce: bytes
    nonce_at: int
    spans: Sequence[Span | None]


def span_of(tensor: torch.Tensor) -> Span | None:
    """Return the place of a tensor; None if it is not on the CPU, or if its elements do not lie next to each other."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    dense = tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if not dense:
        return None
    strides = tuple(tensor.stride()) if tensor.numel() > 1 else ()  # a single element may have any stride
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), strides)


@contextmanager
def offered(tensors: Sequence[torch.Tensor]) -> Iterator[MemoryOffer | None]:
    """Let other processes on this host read the tensors within this context; give None where that is impossible."""
    if sys.platform != "linux" or not hasattr(_libc, "process_vm_readv"):
        yield None
        return
    nonce = secrets.token_bytes(_NONCE_BYTES)
    kept = ctypes.create_string_buffer(nonce, _NONCE_BYTES)
    restricted = _tracing_is_restricted()
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
    try:
        yield MemoryOffer(os.getpid(), nonce, ctypes.addressof(kept), [span_of(tensor) for tensor in tensors])
    finally:
        if restricted:
            _libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def read(offer: MemoryOffer, targets: Sequence[torch.Tensor], check: Callable[[], None]) -> list[bool]:
    """Copy the offered tensors into `targets`, and return for each of them if it was copied.

    A target that was not copied may hold a part of the values. Several threads copy: the other members of the host wait
    meanwhile, and leave their cores to this one.

    Args:
        offer: Another process's tensors, which do not change meanwhile.
        targets: Tensors of the same shapes and types, in the same order.
        check: A function to call between two parts, from any thread; it raises if the copy is not needed any more.
    """
    out = [False] * len(targets)
    if sys.platform != "linux" or len(offer.spans) != len(targets):
        return out
    pieces = []
    for number, (theirs, target) in enumerate(zip(offer.spans, targets, strict=True)):
        mine = span_of(target)
        if theirs is None or mine is None or mine[1:] != theirs[1:]:
            continue
        out[number] = True
        for start in range(0, mine.nbytes, _MOST_BYTES_AT_ONCE):
            size = min(mine.nbytes - start, _MOST_BYTES_AT_ONCE)
            pieces.append((mine.address + start, theirs.address + start, size))
    parts = _parts(pieces)
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(parts)))

    def copy_share(first: int) -> None:
        for part in parts[first::threads]:
            check()
            _copy(offer.pid, part)

    try:
        found = ctypes.create_string_buffer(_NONCE_BYTES)
        _copy(offer.pid, [(ctypes.addressof(found), offer.nonce_at, _NONCE_BYTES)])
        if found.raw != offer.nonce:
            raise OSError(f"process {offer.pid} is another process here")
        with ThreadPoolExecutor(threads, thread_name_prefix="spark_elastic-read") as pool:
            list(pool.map(copy_share, range(threads)))
    except OSError as error:
        log.info("the state is sent and not read from the memory of process %d: %s", offer.pid, error)
        return [False] * len(targets)
    return out


def _parts(pieces: Sequence[Copied]) -> list[list[Copied]]:
    """Divide pieces into parts for one system call each."""
    parts: list[list[Copied]] = []
    filled = 0
    for piece in pieces:
        if not parts or filled + piece[2] > _MOST_BYTES_AT_ONCE or len(parts[-1]) == _MOST_AT_ONCE:
            parts.append([])
            filled = 0
        parts[-1].append(piece)
        filled += piece[2]
    return parts


def _copy(pid: int, pieces: Sequence[Copied]) -> None:
    """Copy pieces from the memory of a process.

    Raises:
        OSError: The kernel does not permit it, the process is gone, or it has no such memory.
    """
    count, size = len(pieces), sum(piece[2] for piece in pieces)
    if not size:
        return
    here = (_Piece * count)(*(_Piece(mine, nbytes) for mine, _, nbytes in pieces))
    there = (_Piece * count)(*(_Piece(theirs, nbytes) for _, theirs, nbytes in pieces))
    copied = _libc.process_vm_readv(pid, here, count, there, count, 0)
    if copied < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if copied != size:
        raise OSError(f"only {copied} of {size} bytes could be read")


def _tracing_is_restricted() -> bool:
    """Return True if the kernel's module Yama permits access to a process's memory to its ancestors only."""
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1"
    except OSError:
        return False
