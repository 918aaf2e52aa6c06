"""A split's files, opened for reading: from the store itself if it is a local one, else from a cache on this host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from spark_elastic.data import local_check
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.local_check import LocalCheck
from spark_elastic.data.read_ahead import Ahead, Ranges, Source
from spark_elastic.data.rows import GatheredRows, MappedRows, Numbering, open_rows
from spark_elastic.data.sidecars import Sidecars

_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", None)
_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", None)
_MAPPED_BYTES = 2 << 30
_PIECE_BYTES = 8 << 20
"""What is wanted at a time of rows that come as they lie in the files; less where several would not fit the cache."""


class SplitFiles:
    """numbering: of the rows. rows: their records. sidecars: None: no field that is read needs them.

    Raises: DatasetError: a file is missing or has another size than the manifest says.
    """

    def __init__(
        self, dataset: Dataset, split: str, sidecars: bool, cache_dir: str | Path | None, cache_bytes: int | None
    ) -> None:
        shards = dataset.manifest.splits[split]
        stride = dataset.layout.stride
        self.numbering = Numbering([shard.rows for shard in shards], dataset.layout.rows_per_page_run)
        self._opened: list[Callable[[], None]] = []
        try:
            source: Source
            if dataset.store.is_local:
                paths = [dataset.store.local_path(shard.file) for shard in shards]
                sides = [dataset.store.local_path(shard.sidecar) if shard.sidecar else None for shard in shards]
            else:
                from spark_elastic.data.remote_cache import CachedSplit

                cached = CachedSplit(dataset, split, self.numbering, sidecars, cache_dir, cache_bytes)
                self._opened.append(cached.close)
                source, paths, sides = cached, cached.paths, cached.sidecar_paths
            self.rows = open_rows(paths, self.numbering, stride, [shard.nbytes for shard in shards])
            self._opened.append(self.rows.close)
            if dataset.store.is_local:
                source = LocalSource(paths, self.numbering, stride, self.rows, dataset.manifest.nbytes(split))
            self._check: LocalCheck | None = None
            if dataset.store.is_local and local_check.wanted():
                files = [(shard.file, shard.crc32) for shard in shards]
                files += [(s.sidecar, s.sidecar_crc32) for s in shards if sidecars and s.sidecar is not None]
                drop_behind = dataset.manifest.nbytes(split) > _memory_bytes() // 2
                self._check = LocalCheck(dataset, files, drop_behind)
                self._opened.append(self._check.close)
            self.sidecars: Sidecars | None = None
            if sidecars:
                self.sidecars = Sidecars(sides, [shard.sidecar_nbytes for shard in shards], dataset.store.url)
                self._opened.append(self.sidecars.close)
        except BaseException:
            self.close()
            raise
        self._source = source
        piece_bytes = _PIECE_BYTES if cache_bytes is None else min(_PIECE_BYTES, cache_bytes // 8)
        self._piece_rows = max(1, piece_bytes // stride)

    def ahead(self) -> Ahead:
        """For one pass."""
        return Ahead(self._source, self.numbering, self._piece_rows)

    def checked(self, timeout_s: float | None) -> bool:
        """Wait until the files were compared with their checksums; those of a remote set are when they arrive.

        timeout_s: 0: only look; None: as long as it takes.
        Returns: whether they were.
        Raises: DatasetError: one is not what was written.
        """
        return self._check is None or self._check.result(timeout_s)

    def close(self) -> None:
        while self._opened:
            self._opened.pop()()


class LocalSource:
    """Files of this host: the system is asked to read them in large pieces, rather than page by page when touched.

    nbytes: of the split. Windows of what is large are unmapped behind, because resource managers count mapped pages as
    this process's; what is too large to stay in memory also leaves the page cache, to make room for what comes.
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
        self.at_once = nbytes <= _MAPPED_BYTES
        self._drop_behind = nbytes > _memory_bytes() // 2
        self._guard = threading.Lock()
        self._asked = False

    def want(self, ranges: Ranges) -> Ranges:
        self._advise(ranges, _WILLNEED)
        return ranges

    def wait(self, wanted: Ranges, stopping: Future[None]) -> None:
        """The system makes whoever touches a page wait until it is there."""

    def release(self, wanted: Ranges) -> None:
        for start, stop in wanted:
            self._rows.forget(start, stop)
        if self._drop_behind:
            self._advise(wanted, _DONTNEED)

    def want_all(self, stopping: Future[None]) -> None:
        with self._guard:
            if not (self._asked or self._drop_behind):  # what does not stay in memory cannot be brought there whole
                self._advise([(0, self._numbering.rows)], _WILLNEED)
            self._asked = True

    def _advise(self, ranges: Ranges, advice: int | None) -> None:
        if advice is None:  # a system without it
            return
        pieces = [piece for start, stop in ranges for piece in self._numbering.ranges(start, stop)]
        file, opened = -1, -1
        try:
            for shard, first, last in sorted(pieces):
                if shard != opened:
                    if file >= 0:
                        os.close(file)
                    file, opened = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC), shard
                os.posix_fadvise(file, first * self._stride, (last - first) * self._stride, advice)
        except OSError:  # advice only: files that cannot be read say so when they are
            pass
        finally:
            if file >= 0:
                os.close(file)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
