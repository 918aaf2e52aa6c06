"""Many files as one range of memory, so that one gather serves all of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import DatasetError

_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTNEED = 4
_HUGE_PAGE = 2 << 20
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file, and where it goes.

    offset: in the file, a multiple of 4096. at: in the range, likewise. expected: bytes that the whole file must have.
    """

    path: Path
    offset: int
    nbytes: int
    at: int
    expected: int


def possible() -> bool:
    """Whether files can be mapped where we want them: Linux (whose constants these are), with pages of 4 KiB."""
    return sys.platform == "linux" and mmap.PAGESIZE == 4096


def check_size(path: Path, expected: int, found: int | None = None) -> None:
    """Before a file is mapped: reading a map past the file's end would kill the process with SIGBUS.

    found: None: look.

    Raises: DatasetError: the file is missing, or not as long as the manifest says.
    """
    if found is None:
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DatasetError(f"shard {path} cannot be read: {error}", file=str(path)) from error
    if found != expected:
        raise DatasetError(
            f"shard {path} has {found} bytes, the manifest says {expected}; the set is damaged, write it again",
            file=str(path),
            expected=expected,
            found=found,
        )


class FileRange:
    """Pieces of files, mapped read-only into one contiguous range; what lies between them must not be touched.

    bytes: uint8, shape (nbytes,): the range. No view of it may be used once it is closed.

    Raises: DatasetError: a file is missing or has another size; OSError: the system does not map it.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.nbytes = max((piece.at + piece.nbytes for piece in pieces), default=0)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._address: int | None = None
        self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        if not self.nbytes:
            return
        reserved = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = self._mmap(None, self.nbytes + _HUGE_PAGE, _PROT_NONE, reserved, -1, 0)
        # where the page cache holds a file in large pieces, it is only mapped in large pieces at such an address
        self._address = -(-self._reserved // _HUGE_PAGE) * _HUGE_PAGE
        try:
            for piece in pieces:
                self._map(piece)
        except BaseException:
            self.close()
            raise
        # frombuffer of a ctypes array refuses ranges of more than 2 GiB on some versions; the interface does not
        self.bytes = np.asarray(_Interface(self._address, self.nbytes))

    def _map(self, piece: Piece) -> None:
        assert self._address is not None
        try:
            file = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DatasetError(f"shard {piece.path} cannot be read: {error}", file=str(piece.path)) from error
        try:
            check_size(piece.path, piece.expected, os.fstat(file).st_size)
            flags = _MAP_SHARED | _MAP_FIXED
            self._mmap(self._address + piece.at, piece.nbytes, _PROT_READ, flags, file, piece.offset)
        finally:
            os.close(file)  # the map keeps the file

    def _mmap(self, address: int | None, nbytes: int, protection: int, flags: int, file: int, offset: int) -> int:
        made: int | None = self._libc.mmap(address, nbytes, protection, flags, file, offset)
        if made is None or made == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
        return made

    def forget(self, start: int, stop: int) -> None:
        """Take the whole pages of `[start, stop)` out of this process's memory; they are read again when touched."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if self._address is not None and first < last:
            self._libc.madvise(self._address + first, last - first, _MADV_DONTNEED)

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        if self._address is not None:
            self._libc.munmap(self._reserved, self.nbytes + _HUGE_PAGE)
            self._address = None

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:
            self.close()


class _Interface:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, True),
        }
