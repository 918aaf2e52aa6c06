"""The open files of a split: the files of a local store, or the copies of a remote store's files in this host's cache.

Files of a local store are compared with the manifest's checksums while they are read, once per host and dataset.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from spark_elastic.data.manifest import Manifest, checksum_error
from spark_elastic.data.prefetch import Ranges, ReadAhead, Source
from spark_elastic.data.remote_cache import CachedSplit, disk_bytes
from spark_elastic.data.rows import MappedFiles, Numbering, ShardRows, Sidecars
from spark_elastic.data.store import Store
from spark_elastic.errors import DatasetError, InvalidSettingsError

_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", None)
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", None)
_PRELOAD_BYTES = 2 << 30  # local splits up to this size are read as a whole, whatever the order
_PART_BYTES = 8 << 20  # bytes of one request for rows in the order of the files


class SplitFiles:
    """The files of one split, opened for reading: numbers of the rows, their records, their values of variable length.

    Sidecars are opened only if `sidecars`. Raise DatasetError for a file that is missing or has the wrong size.
    `rows_at_once` are the most rows that the ranks of a host gather at the same time, in the order of the files; None:
    all, shuffled.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        split: str,
        sidecars: bool,
        cache_dir: str | Path | None,
        cache_bytes: int | None,
        rows_at_once: int | None = None,
    ) -> None:
        shards = manifest.splits[split]
        stride = manifest.layout.stride
        self.numbering = Numbering([shard.rows for shard in shards])
        self._opened: list[Callable[[], None]] = []
        self._check: LocalCheck | None = None
        self.sidecars: Sidecars | None = None
        self._part_rows = max(1, _PART_BYTES // stride)
        self._source: Source
        if not store.is_local:
            least = least_cache_bytes(manifest, split, rows_at_once)
            cached = CachedSplit(store, manifest, split, self.numbering, sidecars, cache_dir, cache_bytes, least)
            self._opened.append(cached.close)
            self._source, self.rows, self.sidecars = cached, cached.rows, cached.sidecar_values
            return
        try:
            paths = [store.local_path(shard.file) for shard in shards]
            records = MappedFiles(paths, [shard.nbytes for shard in shards])
            self._opened.append(records.close)
            self.rows = ShardRows(records, self.numbering, stride)
            nbytes = manifest.nbytes(split)
            # files of more than half of the memory do not stay in the page cache
            drop_behind = nbytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            self._source = LocalSource(paths, self.rows, nbytes <= _PRELOAD_BYTES, drop_behind)
            if (setting := os.environ.get(SETTING, "on")) not in ("on", "off"):
                raise InvalidSettingsError(f"{SETTING} must be 'on' or 'off', not {setting!r}")
            if setting == "on":
                files = [(shard.file, shard.crc32) for shard in shards]
                files += [(s.sidecar, s.sidecar_crc32) for s in shards if sidecars and s.sidecar is not None]
                self._check = LocalCheck(store, files, drop_behind)
                self._opened.append(self._check.close)
            if sidecars:
                sides = [store.local_path(shard.sidecar) if shard.sidecar else None for shard in shards]
                values = MappedFiles(sides, [shard.sidecar_nbytes for shard in shards])
                self._opened.append(values.close)
                self.sidecars = Sidecars(values, store.url)
        except BaseException:
            self.close()
            raise

    def read_ahead(self) -> ReadAhead:
        """Return the read-ahead of one pass over the split."""
        return ReadAhead(self._source, self.numbering.rows, self._part_rows)

    def checked(self, timeout_s: float | None) -> bool:
        """Return `LocalCheck.result`; True for remote files, which the cache compares when they arrive."""
        return self._check is None or self._check.result(timeout_s)

    def close(self) -> None:
        while self._opened:
            self._opened.pop()()


def least_cache_bytes(manifest: Manifest, split: str, rows_at_once: int | None) -> int:
    """Return the most bytes of shards read at a time: all in a shuffle (None), else those of a few neighbours."""
    shards = manifest.splits[split]
    sizes = [disk_bytes(shard.nbytes) + disk_bytes(shard.sidecar_nbytes) for shard in shards]
    if rows_at_once is None:
        return sum(sizes)
    rows_at_once += 4 * max(1, _PART_BYTES // manifest.layout.stride)  # with what is read ahead, in whole parts
    most = first = rows = nbytes = 0
    for shard, size in zip(shards, sizes, strict=True):
        rows, nbytes = rows + shard.rows, nbytes + size
        while rows - shard.rows - shards[first].rows + 2 > rows_at_once:  # from the last row of one to the first
            rows, nbytes, first = rows - shards[first].rows, nbytes - sizes[first], first + 1
        most = max(most, nbytes)
    return most


class LocalSource:
    """The files of a local split: the system is advised to read them in large pieces, not page by page when touched.

    Windows of large splits are evicted after use, because resource managers count mapped pages as this process's
    memory. Splits too large to stay in memory also leave the page cache, to make room for the next windows.
    """

    def __init__(self, paths: list[Path], rows: ShardRows, preload_always: bool, drop_behind: bool) -> None:
        self._paths = paths
        self._rows = rows
        self.preload_always = preload_always
        self._drop_behind = drop_behind
        self._guard = threading.Lock()
        self._preloaded = False

    def request(self, ranges: Ranges) -> Ranges:
        self._advise(ranges, _WILLNEED)
        return ranges

    def wait(self, request: Ranges, stopping: Future[None]) -> None:
        """Return at once: the system blocks the reader of a page that is not there yet."""

    def release(self, request: Ranges) -> None:
        for start, stop in request:
            self._rows.evict(start, stop)
        if self._drop_behind:
            self._advise(request, _DONTNEED)

    def preload(self, stopping: Future[None]) -> None:
        with self._guard:
            if not (self._preloaded or self._drop_behind):  # a split that exceeds the page cache cannot be preloaded
                self._advise([(0, self._rows.numbering.rows)], _WILLNEED)
            self._preloaded = True

    def _advise(self, ranges: Ranges, advice: int | None) -> None:
        if advice is None:  # a system without posix_fadvise
            return
        parts = [part for start, stop in ranges for part in self._rows.numbering.ranges(start, stop)]
        stride = self._rows.stride
        with contextlib.suppress(OSError):  # a file that cannot be read is reported when it is read
            for shard, parts_of_shard in groupby(sorted(parts), key=itemgetter(0)):
                file = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for _, first, last in parts_of_shard:
                        os.posix_fadvise(file, first * stride, (last - first) * stride, advice)
                finally:
                    os.close(file)


# --- comparison with the checksums ------------------------------------------------------------------

SETTING = "SPARK_ELASTIC_CHECK_ROWS"  # environment variable: with "off", files of local datasets are not compared
CHECKED = "checked"  # the subfolder of a dataset with the records of each host
_READ_BYTES = 1 << 20
_LOCK_POLL_S = 0.2

_log = logging.getLogger(__name__)


class LocalCheck:
    """A comparison of files and their checksums on a thread, which ends with the last file or with `close`.

    The processes of a host that read the same dataset share one lock. The first one compares, and records each file
    that is intact; the others find the records. If a process dies, the next one continues after the last recorded file.
    With drop_behind, files leave the page cache after the comparison, because the dataset exceeds the memory.
    """

    def __init__(self, store: Store, files: list[tuple[str, int]], drop_behind: bool) -> None:
        self._store = store
        self._files = files
        self._drop_behind = drop_behind
        self._stop = threading.Event()
        self._done: Future[None] = Future()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._thread = threading.Thread(target=self._run, name="spark_elastic-check", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s`, and return whether the end was reached. Raise DatasetError for a changed file."""
        with contextlib.suppress(TimeoutError):
            self._done.result(timeout_s)
            return True
        return False

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as open_files:
                self._compare_all(self._locked_records(open_files))
            self._done.set_result(None)
        except BaseException as error:  # raised again by `result`
            self._done.set_exception(error)

    def _locked_records(self, open_files: contextlib.ExitStack) -> Path | None:
        """Return this host's file of records, locked until `open_files` close; None: the dataset is read-only."""
        folder = self._store.local_path(CHECKED)
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()  # without its parents: the dataset may be deleted at this moment
            lock = open_files.enter_context((folder / f"{host}.lock").open("ab"))
            while not self._stop.is_set():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._stop.wait(_LOCK_POLL_S)
        except OSError as error:
            _log.info("each process compares the checksums of %s for itself: %s", self._store.url, error)
            return None
        return folder / f"{host}.json"

    def _compare_all(self, records: Path | None) -> None:
        known: dict[str, list[int]] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):  # no records yet, or damaged ones
            known = dict(json.loads(records.read_bytes())) if records is not None else {}
        for file, expected in self._files:
            path = self._store.local_path(file)
            try:
                status = path.stat()
                # at least one of these changes if the file is written to
                version = [status.st_size, status.st_mtime_ns, status.st_ino, expected]
                found = expected if known.get(file) == version else self._checksum(path)
            except OSError as error:
                raise DatasetError(f"shard {path} cannot be read: {error}") from error
            if self._stop.is_set():  # perhaps before the end of the file, or without the lock
                return
            if found != expected:
                raise checksum_error(self._store.url, file, found, expected)
            if known.get(file) != version and records is not None:
                known[file] = version
                # replaced as a whole, so that a kill leaves either the old or the new records
                with contextlib.suppress(OSError):  # the next process compares again
                    written = records.with_suffix(".partial")
                    written.write_text(json.dumps(known))
                    os.replace(written, records)

    def _checksum(self, path: Path) -> int:
        """Return the CRC-32 of a file, or of a part of it if `close` is called meanwhile."""
        found = 0
        with path.open("rb", buffering=0) as stream:
            while not self._stop.is_set() and (count := stream.readinto(self._buffer)):
                found = zlib.crc32(self._buffer[:count], found)
            if self._drop_behind and _DONTNEED is not None:
                os.posix_fadvise(stream.fileno(), 0, 0, _DONTNEED)
        return found
