"""The open files of a split: those of a local store themselves, or their copies in this host's cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from spark_elastic.data import local_check
from spark_elastic.data.local_check import LocalCheck
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.prefetch import Ranges, ReadAhead, Source
from spark_elastic.data.remote_cache import CachedSplit
from spark_elastic.data.rows import GatheredRows, MappedRows, Numbering, Sidecars, open_rows
from spark_elastic.data.store import Store

_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", None)
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", None)
_PRELOAD_BYTES = 2 << 30
"""Local splits up to this size are read as a whole, whatever the order."""
_PART_BYTES = 8 << 20
"""Bytes of one request for rows in the order of the files; less if several would not fit into the cache."""


class SplitFiles:
    """The files of one split, opened for reading. Sidecars are opened only if `sidecars`.

    Attributes:
        numbering: The numbers of the rows.
        rows: Their records.
        sidecars: Their values of variable length. None: no field needs them.

    Raises:
        DatasetError: A file is missing, or has another size than the manifest says.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        split: str,
        sidecars: bool,
        cache_dir: str | Path | None,
        cache_bytes: int | None,
    ) -> None:
        shards = manifest.splits[split]
        stride = manifest.layout.stride
        self.numbering = Numbering([shard.rows for shard in shards], manifest.layout.rows_per_page_run)
        self._opened: list[Callable[[], None]] = []
        self._check: LocalCheck | None = None
        self.sidecars: Sidecars | None = None
        try:
            source: Source
            if store.is_local:
                paths = [store.local_path(shard.file) for shard in shards]
                sides = [store.local_path(shard.sidecar) if shard.sidecar else None for shard in shards]
            else:
                cached = CachedSplit(store, manifest, split, self.numbering, sidecars, cache_dir, cache_bytes)
                self._opened.append(cached.close)
                source, paths, sides = cached, cached.paths, cached.sidecar_paths
            self.rows = open_rows(paths, self.numbering, stride, [shard.nbytes for shard in shards])
            self._opened.append(self.rows.close)
            if store.is_local:
                nbytes = manifest.nbytes(split)
                source = LocalSource(paths, self.numbering, stride, self.rows, nbytes)
                if local_check.is_enabled():
                    files = [(shard.file, shard.crc32) for shard in shards]
                    files += [(s.sidecar, s.sidecar_crc32) for s in shards if sidecars and s.sidecar is not None]
                    self._check = LocalCheck(store, files, drop_behind=_exceeds_page_cache(nbytes))
                    self._opened.append(self._check.close)
            if sidecars:
                self.sidecars = Sidecars(sides, [shard.sidecar_nbytes for shard in shards], store.url)
                self._opened.append(self.sidecars.close)
        except BaseException:
            self.close()
            raise
        self._source = source
        part_bytes = _PART_BYTES if cache_bytes is None else min(_PART_BYTES, cache_bytes // 8)
        self._part_rows = max(1, part_bytes // stride)

    def read_ahead(self) -> ReadAhead:
        """Return the read-ahead of one pass over the split."""
        return ReadAhead(self._source, self.numbering, self._part_rows)

    def checked(self, timeout_s: float | None) -> bool:
        """Wait for the comparison with the checksums, see `LocalCheck.result`.

        The cache compares remote files when they arrive, so this returns True for them at once.
        """
        return self._check is None or self._check.result(timeout_s)

    def close(self) -> None:
        while self._opened:
            self._opened.pop()()


class LocalSource:
    """The files of a local split: the system is advised to read them in large pieces, not page by page when touched.

    Windows of large splits are unmapped after use, because resource managers count mapped pages as this process's
    memory. Splits too large to stay in memory also leave the page cache, to make room for the next windows.
    """

    def __init__(
        self,
        paths: list[Path],
        numbering: Numbering,
        stride: int,
        rows: MappedRows | GatheredRows,
        nbytes: int,
    ) -> None:
        self._paths = paths
        self._numbering = numbering
        self._stride = stride
        self._rows = rows
        self.preload_always = nbytes <= _PRELOAD_BYTES
        self._drop_behind = _exceeds_page_cache(nbytes)
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
                self._advise([(0, self._numbering.rows)], _WILLNEED)
            self._preloaded = True

    def _advise(self, ranges: Ranges, advice: int | None) -> None:
        if advice is None:  # a system without posix_fadvise
            return
        parts = [part for start, stop in ranges for part in self._numbering.ranges(start, stop)]
        file, opened = -1, -1
        try:
            for shard, first, last in sorted(parts):
                if shard != opened:
                    if file >= 0:
                        os.close(file)
                    file, opened = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC), shard
                os.posix_fadvise(file, first * self._stride, (last - first) * self._stride, advice)
        except OSError:  # this is advice only: a file that cannot be read is reported when it is read
            pass
        finally:
            if file >= 0:
                os.close(file)


def _exceeds_page_cache(nbytes: int) -> bool:
    """Return whether files of this size are too large to stay in the page cache: more than half of the memory."""
    return nbytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
