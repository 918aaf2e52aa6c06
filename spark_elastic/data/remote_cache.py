"""Remote shards on this host's disk: as much of them as fits a limit, shared by all workers of the host."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spark_elastic.clock import wall
from spark_elastic.data.block_file import BlockFile
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.layout import Kind
from spark_elastic.data.read_ahead import Ranges, Stopped
from spark_elastic.data.rows import Numbering
from spark_elastic.errors import DatasetError, StoreError

# The folders of a host's cache: one a set, and gone once nobody has read the set for days.

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


_log = logging.getLogger(__name__)
_FETCHERS = 8
"""Requests under way at a time: an object store answers each in tens of ms, and many of them as fast as one."""
_PAUSES_S = (0.0, 1.0)
"""Before the second try and the third: hours of training should not end with one connection."""
_ROOM = 0.9
"""Part of the limit that is left in use when room is made."""
_CHECK_EVERY = 16 << 20
"""Bytes fetched between two looks at what the cache takes: the limit is kept up to this, times the processes."""


@dataclass(slots=True)
class Wanted:
    """futures: one a range. held: (file, start, stop) of what they have brought."""

    futures: list[Future[None]] = field(default_factory=list)
    held: list[tuple[BlockFile, int, int]] = field(default_factory=list)
    released: bool = False


class CachedSplit:
    """A split of a remote set. paths, sidecar_paths: of its files here, as long as those there; only what is wanted
    may be read of them.

    Raises: StoreError: the folder cannot be used.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        numbering: Numbering,
        sidecars: bool,
        cache_dir: str | Path | None,
        cache_bytes: int | None,
    ) -> None:
        self.at_once = False  # a rank's lanes need its share alone
        self._dataset = dataset
        self._numbering = numbering
        self._stride = dataset.layout.stride
        self._references = [f.name for f in dataset.layout.fields if f.kind is not Kind.DENSE] if sidecars else []
        self._root = Path(cache_dir) if cache_dir is not None else default_folder()
        self._limit = cache_bytes
        self._fetched = _CHECK_EVERY  # others may have left more than the limit
        self._guard = threading.Lock()
        self._all = threading.Lock()
        self._everything: Wanted | None = None
        # another set at the same place is another set
        key = hashlib.sha256(dataset.store.url.encode() + dataset.manifest.dumps()).hexdigest()[:24]
        self._unchecked: dict[BlockFile, tuple[str, int]] = {}
        """File → what it is called there, and the manifest's CRC-32 of it."""
        self._touched: set[BlockFile] = set()
        """Those of them that may have become whole since somebody looked."""
        self._remote: list[RemoteFile] = []
        self._files: list[BlockFile] = []
        self._sidecars: list[BlockFile | None] = []
        self._claimed = -1
        try:
            self._claimed = claim(self._root / key)
            remove_stale(self._root, wall())
            if self._limit is None:
                self._limit = default_limit(self._root)
            for shard in dataset.manifest.splits[split]:
                self._files.append(self._local(key, shard.file, shard.nbytes, shard.crc32))
                side = shard.sidecar if sidecars else None
                size, crc32 = shard.sidecar_nbytes, shard.sidecar_crc32
                self._sidecars.append(self._local(key, side, size, crc32) if side else None)
        except OSError as error:
            self.close()
            raise StoreError(f"the cache in {self._root} cannot be used: {error}; set cache_dir") from error
        self.paths = [file.path for file in self._files]
        self.sidecar_paths = [file.path if file else None for file in self._sidecars]
        self._pool = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="spark-elastic-fetch")

    def _local(self, key: str, file: str, nbytes: int, crc32: int) -> BlockFile:
        remote = RemoteFile(lambda: self._dataset.store.open_input(file), f"{self._dataset.store.url}/{file}")
        self._remote.append(remote)
        name = hashlib.sha256(file.encode()).hexdigest()[:16]
        made = BlockFile(self._root / key / f"{name}.data", nbytes, remote.read)
        self._unchecked[made] = (file, crc32)
        return made

    # --- a source of rows -----------------------------------------------------------------------

    def want(self, ranges: Ranges) -> Wanted:
        wanted = Wanted()
        for start, stop in ranges:
            for shard, first, last in self._numbering.ranges(start, stop):
                wanted.futures.append(self._pool.submit(self._bring, wanted, shard, first, last))
        return wanted

    def wait(self, wanted: Wanted, stopping: Future[None]) -> None:
        """Raises: DatasetError: a file is here as a whole by now, and is not what the manifest says."""
        for future in wanted.futures:
            if not future.done():
                futures.wait((future, stopping), return_when=futures.FIRST_COMPLETED)
            if stopping.done():
                raise Stopped
            future.result()
        with self._guard:
            touched, self._touched = self._touched, set()
        for file in touched:
            self._check(file)

    def release(self, wanted: Wanted) -> None:
        with self._guard:
            wanted.released = True
            held, wanted.held = wanted.held, []
        for future in wanted.futures:
            future.cancel()
        for file, start, stop in held:
            file.release(start, stop)

    def want_all(self, stopping: Future[None]) -> None:
        """Raises: DatasetError: a file is not what the manifest says."""
        with self._all:
            if self._everything is not None:
                return
            piece = max(1, (8 << 20) // self._stride)
            rows = self._numbering.rows
            everything = self.want([(start, min(start + piece, rows)) for start in range(0, rows, piece)])
            try:
                self.wait(everything, stopping)
            except BaseException:
                self.release(everything)
                raise
            self._everything = everything

    def _check(self, file: BlockFile) -> None:
        found = file.complete()
        if found is None:
            return
        name, expected = self._unchecked.pop(file, ("", found))
        if found != expected:
            for block in range(len(file.states)):
                file.forget(block)
            raise DatasetError(
                f"{self._dataset.store.url}/{name} has the checksum {found:08x}, the manifest says {expected:08x}; "
                "the set is damaged, write it again",
                file=name,
            )

    def _bring(self, wanted: Wanted, shard: int, first: int, last: int) -> None:
        if wanted.released:
            return
        start, stop = first * self._stride, last * self._stride
        self._hold(wanted, self._files[shard], start, stop)
        side = self._sidecars[shard]
        if side is None or not self._references:
            return
        records = np.fromfile(self.paths[shard], self._dataset.layout.dtype, last - first, offset=start)
        starts = [int(records[name]["start"].min()) for name in self._references]
        stops = [int((records[name]["start"] + records[name]["length"]).max()) for name in self._references]
        if 0 <= min(starts) <= max(stops) <= side.nbytes:  # else whoever gathers it says what is wrong
            self._hold(wanted, side, min(starts), max(stops))

    def _hold(self, wanted: Wanted, file: BlockFile, start: int, stop: int) -> None:
        if stop <= start:
            return
        fetched = file.hold(start, stop)
        with self._guard:
            released = wanted.released
            if not released:
                wanted.held.append((file, start, stop))
            if file in self._unchecked:
                self._touched.add(file)
            self._fetched += fetched
            due = self._limit is not None and self._fetched >= _CHECK_EVERY
            if due:
                self._fetched = 0
        if released:
            file.release(start, stop)
        if due:
            self.make_room()

    # --- the limit ------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Drop what was not wanted for longest, of all sets in the folder, until the limit is kept."""
        if self._limit is None:
            return
        used = used_bytes(self._root)
        if used <= self._limit:
            return
        ours = {file.path: file for file in [*self._files, *self._sidecars] if file is not None}
        others = []
        try:
            files = []
            for path in self._root.glob("*/*.data"):
                file = ours.get(path)
                if file is None:
                    file = BlockFile.of_others(path)
                    if file is None:
                        continue
                    others.append(file)
                files.append(file)
            ages = [file.states["wanted"].astype(np.int64) for file in files]
            owners = np.repeat(np.arange(len(files)), [len(age) for age in ages])
            blocks = np.concatenate([np.arange(len(age)) for age in ages])
            age = np.concatenate(ages)
            for index in np.argsort(age, kind="stable"):
                if used <= self._limit * _ROOM:
                    break
                if age[index]:
                    used -= files[owners[index]].drop(int(blocks[index]))
        except OSError as error:
            _log.warning("the cache cannot keep to its limit of %d bytes: %s", self._limit, error)
            self._limit = None
        finally:
            for file in others:
                file.close()

    def close(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=True, cancel_futures=True)
        for file in [*self._files, *self._sidecars]:
            if file is not None:
                file.close()
        for remote in self._remote:
            remote.close()
        if self._claimed >= 0:
            os.close(self._claimed)
            self._claimed = -1


class RemoteFile:
    """Handles of one file: an open one costs a request, and not every filesystem's may be shared by threads.

    open_handle: -> a pyarrow `RandomAccessFile`. Safe for threads.
    """

    def __init__(self, open_handle: Callable[[], Any], name: str) -> None:
        self._open = open_handle
        self._name = name
        self._idle: list[Any] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises: StoreError: not even with fresh handles."""
        for pause_s in (*_PAUSES_S, None):
            try:
                handle = self._handle()
                data = bytes(handle.read_at(nbytes, offset))
            except Exception as error:  # each filesystem's package has errors of its own
                if pause_s is None or isinstance(error, FileNotFoundError | PermissionError):
                    raise StoreError(f"{self._name} cannot be read: {error}") from error
                self.close()  # those that were opened before the connection broke
                time.sleep(pause_s)
            else:
                self._idle.append(handle)
                return data
        raise AssertionError

    def _handle(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def close(self) -> None:
        """Closes those that nobody reads from."""
        while True:
            try:
                handle = self._idle.pop()
            except IndexError:
                return
            with contextlib.suppress(Exception):
                handle.close()


def default_folder() -> Path:
    """Of this user, in this host's temporary files. Raises: StoreError: it belongs to somebody else."""
    folder = Path(tempfile.gettempdir()) / f"spark_elastic-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise StoreError(f"{folder} belongs to another user; set cache_dir")
    return folder
