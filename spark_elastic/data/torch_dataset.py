"""A `BatchReader` as a torch `IterableDataset`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from spark_elastic.data.reader import Batch, BatchReader
from spark_elastic.errors import InvalidSettingsError


class TorchBatches(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Batches of tensors: each pass over it goes on where the last one stopped, and ends with the epoch.

    ::

        batches = TorchBatches(dataset.reader(batch_size=1024, rank=hvd.rank(), size=hvd.size()))
        state = TorchState(model, optimizer, batches=batches)     # after a resize: batches.set_world(rank, size)
        while batches.epoch < 10:
            for batch in batches:
                loss = step(batch["features"], batch["label"]) * batches.batch.rows / batches.batch.global_rows
                ...

    Items are dicts of tensors by field name (lists, for values of variable length), views into the reader's buffers.
    Use it as it is, or through ``DataLoader(batches, batch_size=None)``; without worker processes, the reader has a
    thread of its own.

    epoch, position: the whole state, also as `state_dict`: rows of this epoch's order that were handed out. batch: the
    `Batch` handed out last, with its row counts.
    """

    def __init__(self, reader: BatchReader, *, epoch: int = 0, position: int = 0) -> None:
        super().__init__()
        self.reader = reader
        self.epoch = epoch
        self.position = position
        self.batch: Batch | None = None

    def set_world(self, rank: int, size: int) -> None:
        """From the next batch on, be rank `rank` of `size`."""
        self.reader.set_world(rank, size)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Takes effect with the next pass, at no cost that grows with the position."""
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if torch.utils.data.get_worker_info() is not None:
            raise InvalidSettingsError("the reader works ahead in a thread of its own; use DataLoader(num_workers=0)")
        return self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[dict[str, Any]]:
        for batch in self.reader.epoch(self.epoch, self.position):
            self.batch, self.position = batch, batch.stop
            yield {
                name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values
                for name, values in batch.tensors.items()
            }
        self.epoch, self.position = self.epoch + 1, 0
