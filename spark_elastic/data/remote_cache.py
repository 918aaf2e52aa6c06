"""A cache of remote shards on this host's disk: limited in size, and shared by all workers of the host.

Each dataset has a folder in the cache, which is removed once nobody has read the dataset for days.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
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
from spark_elastic.data.manifest import Kind, Manifest, checksum_error
from spark_elastic.data.prefetch import Ranges, Stopped
from spark_elastic.data.rows import Numbering
from spark_elastic.data.store import Store, own_temporary_folder
from spark_elastic.errors import StoreError

_LOCK = "lock"
"""A file in a dataset's folder. Readers of the dataset lock it shared, a process that removes the folder exclusively.
Its modification time is when the dataset was last opened."""
_STALE_S = 7 * 86_400.0
_FREE_SHARE = 0.8  # the default limit: this part of what the disk would have free without the cache
_OURS = re.compile(r"lock|[0-9a-f]{16}\.(data|state)")
_FETCHERS = 8  # concurrent requests: an object store takes tens of ms for each, and answers several as fast as one
_PAUSES_S = (0.0, 1.0)  # pauses before the second and third try: a broken connection must not end hours of training
_TARGET_SHARE = 0.9  # the part of the limit that is still in use after room was made
_CHECK_EVERY = 16 << 20
"""Bytes that a process fetches between two checks of the limit, so it is exceeded by this times the processes."""
_PRELOAD_PART_BYTES = 8 << 20

_log = logging.getLogger(__name__)


def lock_folder(folder: Path) -> int:
    """Make a dataset's folder, and protect it from removal until the returned file descriptor is closed."""
    path = folder / _LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the folder was removed at this moment
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
    """Remove datasets that nobody reads and nobody has opened for days. Other files and folders stay."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):  # a process reads the dataset, or has removed it
            names = os.listdir(folder) if re.fullmatch("[0-9a-f]{24}", folder.name) else []
            if _LOCK not in names or not all(_OURS.fullmatch(name) for name in names):
                continue
            if (folder / _LOCK).stat().st_mtime < now - _STALE_S:
                _remove(folder, names)


def _remove(folder: Path, names: list[str]) -> None:
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in sorted(names, key=_LOCK.__eq__):  # the lock last: until then no other process uses the folder
            (folder / name).unlink()
        folder.rmdir()
    finally:
        os.close(file)


def used_bytes(root: Path) -> int:
    """Return the bytes of disk that all datasets in the cache use."""
    total = 0
    for path in root.glob("*/*.data"):
        with contextlib.suppress(FileNotFoundError):  # removed at this moment
            total += path.stat().st_blocks * 512
    return total


@dataclass(slots=True)
class FetchRequest:
    """Ranges of rows that are fetched and then held."""

    futures: list[Future[None]] = field(default_factory=list)  # one per range
    # The parts of files that were fetched so far: (file, start, stop) in bytes.
    held: list[tuple[BlockFile, int, int]] = field(default_factory=list)
    released: bool = False  # the rows are not needed any more


class CachedSplit:
    """One split of a remote dataset in the cache; a `Source` of its rows, and of its sidecars if `sidecars`.

    `paths` are the local copies of the shards, as long as the remote files; only requested rows may be read from them.
    `sidecar_paths` are the local copies of the sidecars. Raise StoreError if the cache's folder cannot be used.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        split: str,
        numbering: Numbering,
        sidecars: bool,
        cache_dir: str | Path | None,
        cache_bytes: int | None,
    ) -> None:
        self.preload_always = False  # with order "lanes" a rank needs its share alone
        self._store = store
        self._layout = manifest.layout
        self._numbering = numbering
        self._stride = manifest.layout.stride
        self._references = [f.name for f in manifest.layout.fields if f.kind is not Kind.DENSE] if sidecars else []
        self._root = Path(cache_dir) if cache_dir is not None else own_temporary_folder("cache", "set cache_dir")
        self._limit = cache_bytes
        self._fetched = _CHECK_EVERY  # check at the first fetch: other processes may have left more than the limit
        self._guard = threading.Lock()
        self._preload_guard = threading.Lock()
        self._preloaded: FetchRequest | None = None
        # a dataset that was written again under the same URL has another manifest, and so another key
        key = hashlib.sha256(store.url.encode() + manifest.dumps()).hexdigest()[:24]
        self._unchecked: dict[BlockFile, tuple[str, int]] = {}
        """Files that have not been compared yet → name in the store, and CRC-32 by the manifest."""
        self._touched: set[BlockFile] = set()  # unchecked files that may have become complete since the last look
        self._remote: list[RemoteFile] = []
        self._files: list[BlockFile] = []
        self._sidecars: list[BlockFile | None] = []
        self._folder_lock = -1
        try:
            self._folder_lock = lock_folder(self._root / key)
            remove_stale(self._root, wall())
            if self._limit is None:
                self._limit = int(_FREE_SHARE * (used_bytes(self._root) + shutil.disk_usage(self._root).free))
            for shard in manifest.splits[split]:
                self._files.append(self._local_copy(key, shard.file, shard.nbytes, shard.crc32))
                side = shard.sidecar if sidecars else None
                size, crc32 = shard.sidecar_nbytes, shard.sidecar_crc32
                self._sidecars.append(self._local_copy(key, side, size, crc32) if side else None)
        except OSError as error:
            self.close()
            raise StoreError(f"the cache in {self._root} cannot be used: {error}; set cache_dir") from error
        self.paths = [file.path for file in self._files]
        self.sidecar_paths = [file.path if file else None for file in self._sidecars]
        self._pool = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="spark-elastic-fetch")

    def _local_copy(self, key: str, file: str, nbytes: int, crc32: int) -> BlockFile:
        remote = RemoteFile(lambda: self._store.open_input(file), f"{self._store.url}/{file}")
        self._remote.append(remote)
        name = hashlib.sha256(file.encode()).hexdigest()[:16]
        made = BlockFile(self._root / key / f"{name}.data", nbytes, remote.read)
        self._unchecked[made] = (file, crc32)
        return made

    # --- a source of rows -----------------------------------------------------------------------

    def request(self, ranges: Ranges) -> FetchRequest:
        request = FetchRequest()
        for start, stop in ranges:
            for shard, first, last in self._numbering.ranges(start, stop):
                request.futures.append(self._pool.submit(self._fetch, request, shard, first, last))
        return request

    def wait(self, request: FetchRequest, stopping: Future[None]) -> None:
        """Wait until the rows are local, and compare the files that are complete by now with their checksums."""
        for future in request.futures:
            if not future.done():
                futures.wait((future, stopping), return_when=futures.FIRST_COMPLETED)
            if stopping.done():
                raise Stopped
            future.result()
        with self._guard:
            touched, self._touched = self._touched, set()
        for file in touched:
            self._check(file)

    def release(self, request: FetchRequest) -> None:
        with self._guard:
            request.released = True
            held, request.held = request.held, []
        for future in request.futures:
            future.cancel()
        for file, start, stop in held:
            file.release(start, stop)

    def preload(self, stopping: Future[None]) -> None:
        with self._preload_guard:
            if self._preloaded is not None:
                return
            part = max(1, _PRELOAD_PART_BYTES // self._stride)
            rows = self._numbering.rows
            request = self.request([(start, min(start + part, rows)) for start in range(0, rows, part)])
            try:
                self.wait(request, stopping)
            except BaseException:
                self.release(request)
                raise
            self._preloaded = request

    def _check(self, file: BlockFile) -> None:
        found = file.complete()
        if found is None:
            return
        name, expected = self._unchecked.pop(file, ("", found))
        if found != expected:
            for block in range(len(file.states)):
                file.mark_absent(block)
            raise checksum_error(self._store.url, name, found, expected)

    def _fetch(self, request: FetchRequest, shard: int, first: int, last: int) -> None:
        """Fetch rows `first`..`last` of a shard, and the values in the sidecar that they refer to."""
        if request.released:
            return
        start, stop = first * self._stride, last * self._stride
        self._hold(request, self._files[shard], start, stop)
        side = self._sidecars[shard]
        if side is None or not self._references:
            return
        records = np.fromfile(self.paths[shard], self._layout.dtype, last - first, offset=start)
        starts = [int(records[name]["start"].min()) for name in self._references]
        stops = [int((records[name]["start"] + records[name]["length"]).max()) for name in self._references]
        if 0 <= min(starts) <= max(stops) <= side.nbytes:  # `Sidecars` reports references that are out of range
            self._hold(request, side, min(starts), max(stops))

    def _hold(self, request: FetchRequest, file: BlockFile, start: int, stop: int) -> None:
        if stop <= start:
            return
        fetched = file.hold(start, stop)
        with self._guard:
            released = request.released
            if not released:
                request.held.append((file, start, stop))
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
        """Drop the least recently used blocks of all datasets in the cache until the limit is kept."""
        if self._limit is None:
            return
        used = used_bytes(self._root)
        if used <= self._limit:
            return
        ours = {file.path: file for file in [*self._files, *self._sidecars] if file is not None}
        others = []
        try:
            for path in self._root.glob("*/*.data"):
                if path not in ours and (file := BlockFile.of_others(path)) is not None:
                    others.append(file)
            files = [*ours.values(), *others]
            ages = [file.states["used"].astype(np.int64) for file in files]
            owners = np.repeat(np.arange(len(files)), [len(age) for age in ages])
            blocks = np.concatenate([np.arange(len(age)) for age in ages])
            age = np.concatenate(ages)
            for index in np.argsort(age, kind="stable"):
                if used <= self._limit * _TARGET_SHARE:
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
        if self._folder_lock >= 0:
            os.close(self._folder_lock)
            self._folder_lock = -1


class RemoteFile:
    """A pool of open handles, pyarrow `RandomAccessFile`s, of one remote file. Safe for threads.

    To open a handle costs a request, and the handles of some filesystems may not be shared by threads.
    """

    def __init__(self, open_handle: Callable[[], Any], name: str) -> None:
        self._open = open_handle
        self._name = name
        self._idle: list[Any] = []

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read a range of bytes. Raise StoreError if three tries failed."""
        for pause_s in (*_PAUSES_S, None):
            try:
                handle = self._taken() or self._open()
                data = bytes(handle.read_at(nbytes, offset))
            except Exception as error:  # each filesystem's package has its own exceptions
                if pause_s is None or isinstance(error, FileNotFoundError | PermissionError):
                    raise StoreError(f"{self._name} cannot be read: {error}") from error
                self.close()  # handles that were opened before the connection broke
                time.sleep(pause_s)
            else:
                self._idle.append(handle)
                return data
        raise AssertionError

    def _taken(self) -> Any:
        """Return a handle that no thread uses, and remove it from the pool. None: there is none."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def close(self) -> None:
        """Close the handles that no thread uses."""
        while (handle := self._taken()) is not None:
            with contextlib.suppress(Exception):
                handle.close()
