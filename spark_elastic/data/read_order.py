"""In which kind of order a set is read: decided from the manifest and the settings, so it is the same everywhere."""

from __future__ import annotations

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.order.windows import LaneSettings
from spark_elastic.errors import InvalidSettingsError

GLOBAL_BYTES = 4 << 30
"""Sets up to this size are taken to fit into the page cache of every host, next to everything else there."""
_CHUNK_BYTES = 256 << 10
"""Read in one go; a disk or an object store then delivers most of what it can."""
_OPEN_BYTES = 1 << 30
"""What the open windows of all lanes hold together: 4096 chunks. With sorted data the rows of a batch of n vary like
1 + n / chunks times those of a true shuffle: 1.25 for a batch of 1024. It is page cache, and shared by the ranks."""
_LANES = 128
"""Several for each worker, so that workers whose number does not divide it still have nearly equal shares."""
_MANY_ROWS = 1 << 23
"""From here on there can be more of them, without lanes so short that computing them costs more."""


def resolve_order(
    dataset: Dataset,
    split: str = "train",
    *,
    order: str = "auto",
    shuffle: bool = True,
    cache_bytes: int | None = None,
) -> str:
    """ "global" or "lanes". The driver calls this once and tells all workers, or they all call it: it is the same.

    cache_bytes: of a remote set's cache. Rows of a permutation come from everywhere, so all must fit into it. Without
    a shuffle the order is "global", and a few pieces at a time are enough.

    Raises: InvalidSettingsError: no such order, lanes without a shuffle, a permutation of what the cache cannot hold.
    """
    nbytes = dataset.manifest.nbytes(split)
    too_large = not dataset.store.is_local and cache_bytes is not None and nbytes > cache_bytes
    if order not in ("auto", "global", "lanes"):
        raise InvalidSettingsError(f"order must be 'auto', 'global' or 'lanes', not {order!r}")
    if not shuffle:
        if order == "lanes":
            raise InvalidSettingsError("lanes are a way to shuffle; with shuffle=False use order='auto'")
        return "global"
    if order == "global" and too_large:
        raise InvalidSettingsError(
            f"a cache of {cache_bytes} bytes cannot hold the {nbytes} bytes of {split!r}; raise cache_bytes, or "
            "shuffle in lanes"
        )
    if order != "auto":
        return order
    return "global" if nbytes <= GLOBAL_BYTES and not too_large else "lanes"


def lanes_of(dataset: Dataset, split: str = "train", *, cache_bytes: int | None = None) -> LaneSettings:
    """How a reader cuts this split, which is the same for all readers with a cache of this size."""
    kept = None if dataset.store.is_local else cache_bytes
    return lane_settings(dataset.rows(split), dataset.layout.stride, cache_bytes=kept)


def lane_settings(
    rows: int, stride: int, *, cache_bytes: int | None = None, open_bytes: int = _OPEN_BYTES
) -> LaneSettings:
    """How a set is cut into lanes; not a function of the batch size, which may follow the number of workers.

    open_bytes: that the windows of all lanes may cover together. cache_bytes: of a remote set's cache; it also holds
    the next windows, and what is not yet let go.
    """
    if cache_bytes is not None:
        open_bytes = min(open_bytes, cache_bytes // 4)
    lanes = _LANES if rows < _MANY_ROWS else 2 * _LANES
    chunk_rows = max(1, min(_CHUNK_BYTES // stride, -(-rows // (4 * lanes)) or 1))
    return LaneSettings(lanes, chunk_rows, max(chunk_rows, open_bytes // stride // lanes))
