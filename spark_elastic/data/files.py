"""A split's files, opened for reading: from the store itself if it is a local one."""

from __future__ import annotations

from pathlib import Path

from spark_elastic.core.orders import Order
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.rows import GatheredRows, MappedRows, Numbering, open_rows
from spark_elastic.data.sidecars import Sidecars


class SplitFiles:
    """numbering: of the rows. rows: their records. sidecars: None: no field that is read needs them."""

    def __init__(self, dataset: Dataset, split: str, sidecars: bool) -> None:
        shards = dataset.manifest.splits[split]
        self.numbering = Numbering([shard.rows for shard in shards], dataset.layout.rows_per_page_run)
        self._paths = [dataset.store.local_path(shard.file) for shard in shards]
        self.rows: MappedRows | GatheredRows = open_rows(
            self._paths, self.numbering, dataset.layout.stride, [shard.nbytes for shard in shards]
        )
        self.sidecars: Sidecars | None = None
        if sidecars:
            self.sidecars = Sidecars(
                [None if shard.sidecar is None else dataset.store.local_path(shard.sidecar) for shard in shards],
                [shard.sidecar_nbytes for shard in shards],
            )

    def prepare(self, order: Order, start: int, stop: int, rank: int, size: int) -> None:
        """Positions `start`..`stop` are gathered next."""

    def close(self) -> None:
        self.rows.close()
        if self.sidecars is not None:
            self.sidecars.close()


def open_files(
    dataset: Dataset,
    split: str,
    sidecars: bool,
    cache_dir: str | Path | None,
    cache_bytes: int | None,
    *,
    windowed: bool,
) -> SplitFiles:
    return SplitFiles(dataset, split, sidecars)
