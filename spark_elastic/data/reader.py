"""Reads the batches of a materialised set: the same global batches for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spark_elastic.core.sampling import EpochOrder
from spark_elastic.data.batch import Batch
from spark_elastic.errors import InvalidSettingsError


class BatchReader:
    """Batches of one split, in an order that is a function of (seed, epoch) alone.

    ::

        with BatchReader(dataset, batch_size=1024, rank=rank, size=size) as reader:
            for batch in reader.epoch(0):
                step(batch["features_0"], batch["label_0"], weight=batch.rows / batch.global_rows)

    The state is (epoch, position): `reader.epoch(epoch, position)` goes on after the first `position` rows of that
    epoch's order, on however many ranks there are by then.

    Args:
        dataset: a `Dataset`.
        batch_size: rows of a global batch; ranks share them.
        order: "global": a true permutation of all rows. "lanes": for sets that do not fit into memory, or are remote.
        prefetch: batches that are gathered ahead; 0: none.
        fields: the tensors that batches hold; None: all.
        cache_dir, cache_bytes: where, and how much of, a remote set is kept on this host's disk.

    Raises:
        InvalidSettingsError: a value that cannot be; DatasetError: a shard is missing or damaged.
    """

    def __init__(
        self,
        dataset: Any,
        split: str = "train",
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        order: str = "auto",
        prefetch: int = 3,
        fields: Sequence[str] | None = None,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise InvalidSettingsError(f"batch_size must be at least 1, not {batch_size}")
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._fields = [field for field in dataset.layout.fields if fields is None or field.name in fields]
        self._maps = [
            np.memmap(dataset.store.local_path(shard.file), np.dtype((np.void, dataset.layout.stride)), "r")
            for shard in dataset.manifest.splits[split]
            if shard.rows
        ]
        self._ends = np.cumsum([len(records) for records in self._maps], dtype=np.int64)
        self._dtype = dataset.layout.dtype
        self.rows = int(self._ends[-1]) if len(self._ends) else 0
        self.set_world(rank, size)

    def set_world(self, rank: int, size: int) -> None:
        """From the next batch on, be rank `rank` of `size`."""
        if not 0 <= rank < size:
            raise InvalidSettingsError(f"rank {rank} is not one of {size}")
        self.rank, self.size = rank, size

    def epoch(self, epoch: int, position: int = 0, *, batch_size: int | None = None) -> Iterator[Batch]:
        """The global batches from `position` on: this rank's rows of each."""
        order = EpochOrder(self.rows, self.seed, epoch, self.shuffle)
        while position < self.rows:
            stop = min(position + (batch_size or self.batch_size), self.rows)
            lo, hi = (position + (stop - position) * part // self.size for part in (self.rank, self.rank + 1))
            records = self._take(order[np.arange(lo, hi)]).view(self._dtype)
            tensors = {field.name: records[field.name] for field in self._fields}
            yield Batch(tensors, hi - lo, stop - position, position, stop)
            position = stop

    def _take(self, rows: Any) -> Any:
        if len(self._maps) == 1:
            return np.take(self._maps[0], rows)
        out = np.empty(len(rows), self._maps[0].dtype if self._maps else np.dtype((np.void, self._dtype.itemsize)))
        owners = np.searchsorted(self._ends, rows, side="right")
        for shard in np.unique(owners):
            chosen = np.flatnonzero(owners == shard)
            first = int(self._ends[shard - 1]) if shard else 0
            out[chosen] = np.take(self._maps[shard], rows[chosen] - first)
        return out

    def close(self) -> None:
        """Let go of the files."""
        self._maps = []

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
