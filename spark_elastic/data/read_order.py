"""In which kind of order a set is read: decided from the manifest and the settings, so it is the same everywhere."""

from __future__ import annotations

from spark_elastic.core.lanes import LaneSettings
from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import InvalidSettingsError

GLOBAL_BYTES = 4 << 30
"""Sets up to this size are taken to fit into the page cache of every host, next to everything else there."""
_CHUNK_BYTES = 256 << 10
"""Read in one go; a disk or an object store then delivers most of what it can."""
_OPEN_BYTES = 1 << 30
"""What the open windows of all lanes hold together: 4096 chunks. With sorted data the rows of a batch of n vary like
1 + n / chunks times those of a true shuffle: 1.25 for a batch of 1024. It is page cache, and shared by the ranks."""


def resolve_order(dataset: Dataset, split: str = "train", *, order: str = "auto", shuffle: bool = True) -> str:
    """ "global" or "lanes". The driver calls this once and tells all workers, or they all call it: it is the same.

    Raises: InvalidSettingsError: no such order, or lanes without a shuffle.
    """
    if order not in ("auto", "global", "lanes"):
        raise InvalidSettingsError(f"order must be 'auto', 'global' or 'lanes', not {order!r}")
    if not shuffle:
        if order == "lanes":
            raise InvalidSettingsError("lanes are a way to shuffle; with shuffle=False use order='auto'")
        return "global"
    if order != "auto":
        return order
    # a remote set is fetched once and then read from the local disk, or its cache: the same question
    return "global" if dataset.manifest.nbytes(split) <= GLOBAL_BYTES else "lanes"


def lane_settings(rows: int, stride: int, batch_size: int, open_bytes: int = _OPEN_BYTES) -> LaneSettings:
    """How a set is cut into lanes.

    batch_size: of the training, global: if the number of lanes divides it, ranks have equal shares of a batch.
    open_bytes: that the windows of all lanes may cover together.
    """
    dividing = [lanes for lanes in range(32, 129) if batch_size % lanes == 0]
    lanes = max(dividing, default=min(64, batch_size))
    chunk_rows = max(1, min(_CHUNK_BYTES // stride, -(-rows // (4 * lanes)) or 1))
    return LaneSettings(lanes, chunk_rows, max(chunk_rows, open_bytes // stride // lanes))
