"""The folders of a host's cache: one a set, and gone once nobody has read the set for days."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

_LOCK = "lock"
"""Shared by those who read the set, alone for who removes it. Its time of change is when the set was last opened."""
_STALE_S = 7 * 86_400.0
_FREE_SHARE = 0.8
_OURS = re.compile(r"lock|[0-9a-f]{16}\.(data|state)")


def claim(folder: Path) -> int:
    """Makes the folder, and keeps it until the file that is returned is closed. Raises: OSError."""
    path = folder / _LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed in this moment
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                os.utime(file)
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def remove_stale(root: Path, now: float) -> None:
    """Sets that nobody reads, nor has opened for days. Other files and folders stay."""
    for folder in root.iterdir():
        try:
            names = os.listdir(folder) if re.fullmatch("[0-9a-f]{24}", folder.name) else []
            if _LOCK not in names or not all(_OURS.fullmatch(name) for name in names):
                continue
            if (folder / _LOCK).stat().st_mtime < now - _STALE_S:
                _remove(folder, names)
        except OSError:  # somebody reads it, or was quicker
            continue


def _remove(folder: Path, names: list[str]) -> None:
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in sorted(names, key=_LOCK.__eq__):  # the lock last: until then nobody else begins
            (folder / name).unlink()
        folder.rmdir()
    finally:
        os.close(file)


def used_bytes(root: Path) -> int:
    """What all sets take of the disk."""
    total = 0
    for path in root.glob("*/*.data"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # removed in this moment
            continue
    return total


def default_limit(root: Path) -> int:
    """Bytes that the cache may take: most of what is free, so that others find some room too."""
    return int(_FREE_SHARE * (used_bytes(root) + shutil.disk_usage(root).free))
