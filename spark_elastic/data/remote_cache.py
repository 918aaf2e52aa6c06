"""A cache of remote shards on this host's disk: whole files, limited in bytes, shared by all workers of the host.

::

    <cache_dir>/<32 hex digits>.shard      a whole file. Its readers lock it shared, who deletes it locks it exclusively
               /<32 hex digits>.partial    the same, being fetched, with its full length; the fetching process locks it
               /lock                       locked while room is made

A file gets its name once its checksum is right. Locks belong to open files, so the system releases them when a process
dies: the next one that needs the file fetches it again. The modification time of a file is made from its checksum, so a
file that was written to is noticed; the access time is when it was last used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spark_elastic.clock import monotonic, wall
from spark_elastic.data.manifest import Manifest, checksum_error
from spark_elastic.data.prefetch import Ranges, Stopped
from spark_elastic.data.rows import MappedFiles, Numbering, ShardRows, Sidecars, allow_descriptors
from spark_elastic.data.store import Store, own_temporary_folder
from spark_elastic.errors import InvalidSettingsError, StoreError

_OURS = re.compile(r"[0-9a-f]{32}\.(shard|partial)")
_STALE_S = 7 * 86_400.0
_FREE_SHARE = 0.8  # the default limit: this part of what the disk would have free without the cache
_DISK_BLOCK = 4096  # a file takes whole blocks of the disk
_SHARDS = 2  # shards that a process fetches at the same time
_FETCHERS = 8  # concurrent requests: an object store takes tens of ms for each, and answers several as fast as one
_PART_BYTES = 4 << 20  # bytes of a request
_PAUSES_S = (0.0, 1.0)  # pauses before the second and third try: a broken connection must not end hours of training
_POLL_S = 0.05  # between looks at a lock of another process, which may fetch for minutes
ROOM_TIMEOUT_S = 300.0  # how long a fetch waits until others release shards that are in its way


def disk_bytes(nbytes: int) -> int:
    """Return the bytes of disk that a file takes."""
    return -(-nbytes // _DISK_BLOCK) * _DISK_BLOCK


class ShardCache:
    """The folder of the cache. Safe for threads and processes.

    The limit counts all files in it, also those that are being fetched and those of other datasets. A file that a
    reader holds is never deleted.
    """

    def __init__(self, root: Path, limit: int | None) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        with self._locked():
            used = sum(disk_bytes(status.st_size) for _, status in self._files())
            self.limit = limit if limit is not None else int(_FREE_SHARE * (used + shutil.disk_usage(root).free))
            self._shrink(0)

    def hold(self, file: _CachedFile) -> int | None:
        """Return a descriptor that keeps a file in the cache until it is closed; None if the file is not there."""
        try:
            held = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(held, fcntl.LOCK_SH)  # others hold it exclusively for a moment at most
        status = os.fstat(held)
        if _is_at(held, file.path):
            if (status.st_size, status.st_mtime_ns) == (file.nbytes, _mark(file.crc32)):
                _touch(held, file.crc32)
                return held
            file.path.unlink(missing_ok=True)  # it was written to, or cut off
        os.close(held)
        return None

    def fetch(self, file: _CachedFile, parts: Iterator[bytes], stopping: threading.Event) -> int | None:
        """Write the parts of a file into the cache, and return its descriptor as `hold` does.

        None: another process fetches it or has just done so, or `stopping` was set. Raise DatasetError if the checksum
        is another one, and StoreError if there is no room.
        """
        unfinished = file.path.with_suffix(".partial")
        try:
            with contextlib.ExitStack() as closing:
                held = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                closing.callback(os.close, held)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    stopping.wait(_POLL_S)
                    return None
                if not _is_at(held, unfinished) or file.path.exists():  # another process was done at this moment
                    if _is_at(held, unfinished):
                        unfinished.unlink()
                    return None
                try:
                    self._make_room(held, unfinished, file.nbytes, stopping)
                    found, at = 0, 0
                    for part in parts:
                        found = zlib.crc32(part, found)
                        at += os.pwrite(held, part, at)
                    if at != file.nbytes:  # a disk that is nearly full accepts a part of the data
                        raise OSError(f"{at} of {file.nbytes} bytes were written")
                    if found != file.crc32:
                        raise checksum_error(file.store.url, file.name, found, file.crc32)
                    os.fsync(held)  # or a power cut could leave a file of zeros under the right name
                    _touch(held, file.crc32)
                    os.rename(unfinished, file.path)
                except BaseException:
                    unfinished.unlink(missing_ok=True)
                    raise
                fcntl.flock(held, fcntl.LOCK_SH)
                if not _is_at(held, file.path):  # deleted between the two locks
                    return None
                closing.pop_all()
                return held
        except OSError as error:
            raise StoreError(f"{unfinished} cannot be written: {error}; set cache_dir or cache_bytes") from error

    def _make_room(self, file: int, unfinished: Path, nbytes: int, stopping: threading.Event) -> None:
        """Give the file its length once the limit allows it; delete the least recently used files for that."""
        deadline = monotonic() + ROOM_TIMEOUT_S
        while True:
            with self._locked():
                used = self._shrink(disk_bytes(nbytes), unfinished)
                if used + disk_bytes(nbytes) <= self.limit:
                    os.ftruncate(file, nbytes)
                    return
            if stopping.is_set():
                raise Stopped
            if monotonic() > deadline:
                raise StoreError(
                    f"the cache in {self.root} has a limit of {self.limit} bytes; its readers on this host use {used}, "
                    f"and a shard of {nbytes} does not fit beside. Set cache_bytes to at least "
                    f"{used + disk_bytes(nbytes)}, or use another cache_dir"
                )
            stopping.wait(_POLL_S)

    def _shrink(self, room: int, besides: Path | None = None) -> int:
        """Delete stale files, and others as long as there is no room; return the bytes used, without `besides`."""
        found = [(path, status) for path, status in self._files() if path != besides]
        used = sum(disk_bytes(status.st_size) for _, status in found)
        for path, status in sorted(found, key=lambda each: each[1].st_atime_ns):
            too_old = status.st_atime < wall() - _STALE_S
            if (too_old or used + room > self.limit) and _delete_unless_held(path):
                used -= disk_bytes(status.st_size)
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.root.iterdir():
            if _OURS.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # a fetch has failed or ended at this moment
                    yield path, path.stat()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with os.fdopen(os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _mark(crc32: int) -> int:
    """Return the modification time of a file with this checksum, in ns: within the range of every filesystem."""
    return (crc32 & 0x3FFFFFFF) * 1_000_000_000


def _touch(file: int, crc32: int) -> None:
    os.utime(file, ns=(int(wall() * 1e9), _mark(crc32)))


def _delete_unless_held(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it is gone, or a reader holds it
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
        finally:
            os.close(file)
    return False


# --- the shards of a split --------------------------------------------------------------------------


class _CachedFile:
    """A file of a remote store, and the path of its copy in the cache. Safe for threads.

    It keeps open handles, pyarrow `RandomAccessFile`s: to open one costs a request, and those of some filesystems may
    not be shared by threads.
    """

    def __init__(self, store: Store, root: Path, name: str, nbytes: int, crc32: int) -> None:
        self.store, self.name, self.nbytes, self.crc32 = store, name, nbytes, crc32
        self._url = f"{store.url}/{name}"
        # a dataset that was written again under the same URL has files of other names or checksums
        key = hashlib.sha256(f"{self._url} {nbytes} {crc32}".encode()).hexdigest()[:32]
        self.path = root / f"{key}.shard"
        self._idle: list[Any] = []  # handles that no thread uses

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read a range of bytes. Raise StoreError if three tries failed, or the file is too short."""
        for pause_s in (*_PAUSES_S, None):
            try:
                handle = self._taken() or self.store.open_input(self.name)
                data = bytes(handle.read_at(nbytes, offset))
            except Exception as error:  # each filesystem's package has its own exceptions
                if pause_s is None or isinstance(error, FileNotFoundError | PermissionError):
                    raise StoreError(f"{self._url} cannot be read: {error}") from error
                self.close()  # handles that were opened before the connection broke
                time.sleep(pause_s)
            else:
                self._idle.append(handle)
                if len(data) != nbytes:
                    raise StoreError(
                        f"{self._url}: {len(data)} of {nbytes} bytes were delivered at {offset}; the file is cut off"
                    )
                return data
        raise AssertionError

    def _taken(self) -> Any:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def close(self) -> None:
        """Close the handles that no thread uses."""
        while (handle := self._taken()) is not None:
            with contextlib.suppress(Exception):
                handle.close()


class CachedSplit:
    """One split of a remote dataset in the cache; a `Source` of its rows, and of its sidecars if `sidecars`.

    `rows` and `sidecar_values` may be read where the rows were requested and waited for. `least` is the most bytes that
    a reader needs at the same time. Raise InvalidSettingsError if `cache_bytes` is less, and StoreError if the disk has
    less room or the cache's folder cannot be used.
    """

    preload_always = False  # with order "lanes", the first windows need not wait for all shards

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        split: str,
        numbering: Numbering,
        sidecars: bool,
        cache_dir: str | Path | None,
        cache_bytes: int | None,
        least: int,
    ) -> None:
        self._numbering = numbering
        check_cache_bytes(cache_bytes, least, split)
        root = Path(cache_dir) if cache_dir is not None else own_temporary_folder("cache", "set cache_dir")
        try:
            self._cache = ShardCache(root, cache_bytes)
        except OSError as error:
            raise StoreError(f"the cache in {root} cannot be used: {error}; set cache_dir") from error
        if self._cache.limit < least:
            raise StoreError(
                f"the cache in {root} has room for {self._cache.limit} bytes, and the shards of {split!r} that are "
                f"read at the same time have {least}; set cache_dir to a larger disk"
            )
        shards = manifest.splits[split]
        self._files = [[_CachedFile(store, root, shard.file, shard.nbytes, shard.crc32)] for shard in shards]
        for files, shard in zip(self._files, shards, strict=True):
            if sidecars and shard.sidecar is not None:
                files.append(_CachedFile(store, root, shard.sidecar, shard.sidecar_nbytes, shard.sidecar_crc32))
        allow_descriptors(2 * sum(map(len, self._files)))
        paths = [files[0].path for files in self._files]
        sides = [files[1].path if len(files) > 1 else None for files in self._files]
        records = MappedFiles(paths, [shard.nbytes for shard in shards], later=True)
        values = MappedFiles(sides, [shard.sidecar_nbytes for shard in shards], later=True)
        self._maps = (records, values)
        self.rows = ShardRows(records, numbering, manifest.layout.stride)
        self.sidecar_values = Sidecars(values, store.url) if sidecars else None
        self._guard = threading.Lock()
        self._uses: Counter[int] = Counter()  # requests that were not released, by shard
        self._local: dict[int, Future[None]] = {}
        self._held: dict[int, list[int]] = {}  # descriptors of the files of a mapped shard
        self._preloaded: dict[int, Future[None]] | None = None  # never released
        self._stopping = threading.Event()
        self._shards = ThreadPoolExecutor(_SHARDS, thread_name_prefix="spark-elastic-shard")
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="spark-elastic-fetch")

    def request(self, ranges: Ranges) -> dict[int, Future[None]]:
        """Start to fetch the shards of these rows."""
        shards = sorted({shard for start, stop in ranges for shard, _, _ in self._numbering.ranges(start, stop)})
        with self._guard:
            self._uses.update(shards)
            for shard in shards:
                if shard not in self._local:
                    self._local[shard] = self._shards.submit(self._get, shard)
            return {shard: self._local[shard] for shard in shards}

    def wait(self, request: dict[int, Future[None]], stopping: Future[None]) -> None:
        for future in request.values():
            if not future.done():
                futures.wait((future, stopping), return_when=futures.FIRST_COMPLETED)
            if stopping.done():
                raise Stopped
            future.result()

    def release(self, request: dict[int, Future[None]]) -> None:
        with self._guard:
            for shard, future in request.items():
                self._uses[shard] -= 1
                # the thread of one that is being fetched sees that nobody needs it any more
                if not self._uses[shard] and (shard in self._held or future.cancel() or future.done()):
                    del self._local[shard]
                    self._shut(shard)

    def preload(self, stopping: Future[None]) -> None:
        if self._preloaded is None:
            self._preloaded = self.request([(0, self._numbering.rows)])
        self.wait(self._preloaded, stopping)

    def _get(self, shard: int) -> None:
        """Hold the files of a shard, fetched if they are not there, and map them."""
        held: list[int] = []
        try:
            held += [self._hold(file) for file in self._files[shard] if file.nbytes]
            for maps in self._maps:
                maps.open(shard)
        except BaseException:
            for file in held:
                os.close(file)
            with self._guard:
                if not self._uses[shard]:  # released meanwhile: the next request tries again
                    del self._local[shard]
            raise
        with self._guard:
            self._held[shard] = held
            if not self._uses[shard]:  # released meanwhile
                del self._local[shard]
                self._shut(shard)

    def _hold(self, file: _CachedFile) -> int:
        while not self._stopping.is_set():
            held = self._cache.hold(file)
            if held is None:
                held = self._cache.fetch(file, self._parts(file), self._stopping)
            if held is not None:
                return held
        raise Stopped

    def _parts(self, file: _CachedFile) -> Iterator[bytes]:
        ahead: deque[Future[bytes]] = deque()
        for at in range(0, file.nbytes, _PART_BYTES):
            if self._stopping.is_set():
                raise Stopped
            ahead.append(self._fetchers.submit(file.read, at, min(_PART_BYTES, file.nbytes - at)))
            if len(ahead) >= _FETCHERS // _SHARDS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _shut(self, shard: int) -> None:
        for maps in self._maps:
            maps.shut(shard)
        for file in self._held.pop(shard, ()):
            os.close(file)

    def close(self) -> None:
        self._stopping.set()
        self._shards.shutdown(wait=True, cancel_futures=True)
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        for maps in self._maps:
            maps.close()
        for held in self._held.values():
            for descriptor in held:
                os.close(descriptor)
        self._held.clear()
        for files in self._files:
            for file in files:
                file.close()


def check_cache_bytes(cache_bytes: int | None, least: int, what: str) -> None:
    """Raise InvalidSettingsError if a cache cannot hold the shards that are read at the same time."""
    if cache_bytes is not None and cache_bytes < least:
        raise InvalidSettingsError(
            f"a cache of {cache_bytes} bytes cannot hold the shards of {what!r} that are read at the same time, which "
            f"have {least}; set cache_bytes to at least {least} (a shuffle reads all of them), or mount the store"
        )
