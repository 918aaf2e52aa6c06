"""A `BatchReader` as a torch `IterableDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from spark_elastic.data.reader import Batch, BatchReader
from spark_elastic.errors import InvalidSettingsError


class TorchBatches(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Batches of tensors. Each pass resumes where the last one stopped, and ends with the epoch.

    ::

        batches = TorchBatches(dataset.reader(batch_size=1024, rank=hvd.rank(), size=hvd.size()))
        state = TorchState(model, optimizer, batches=batches)     # after a resize: batches.set_world(rank, size)
        while batches.epoch < 10:
            for batch in batches:
                loss = step(batch["features"], batch["label"]) * batches.batch.rows / batches.batch.global_rows
                ...

    Items are dicts of tensors by field name, which are views into the reader's buffers; fields of variable length are
    lists. Iterate over it directly, or through ``DataLoader(batches, batch_size=None)`` without worker processes: the
    reader has its own thread.

    Attributes:
        epoch: The number of the epoch. With `position` it is the whole state, see `state_dict`.
        position: The rows of the epoch's order that were returned.
        batch: The last `Batch` returned, with its row counts.
    """

    def __init__(self, reader: BatchReader, *, epoch: int = 0, position: int = 0) -> None:
        super().__init__()
        self.reader = reader
        self.epoch = epoch
        self.position = position
        self.batch: Batch | None = None

    def set_world(self, rank: int, size: int, shares: Sequence[int] | None = None) -> None:
        """Be rank `rank` of `size` from the next batch on; see `BatchReader.set_world`."""
        self.reader.set_world(rank, size, shares)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Set the state of the next pass. Its cost does not depend on the position."""
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if torch.utils.data.get_worker_info() is not None:
            raise InvalidSettingsError(
                "TorchBatches cannot be used in worker processes, as its reader has its own thread; use "
                "DataLoader(num_workers=0)"
            )
        for batch in self.reader.epoch(self.epoch, self.position):
            self.batch, self.position = batch, batch.stop
            yield {
                name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values
                for name, values in batch.tensors.items()
            }
        self.epoch, self.position = self.epoch + 1, 0
