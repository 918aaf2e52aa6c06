"""A sampler whose remaining rows are redistributed over the ranks when the world changes within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch.utils.data

from spark_elastic.collective.process import process
from spark_elastic.data.order.permutation import EpochOrder, Indices, needs_padding, rows_done, share
from spark_elastic.elastic.call_stack import calling_object
from spark_elastic.errors import InvalidSettingsError

_CHUNK = 8192
"""Rows whose positions in the order are computed at a time."""


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distributes the rows of a dataset over the ranks, each once an epoch, however often the world changes.

    Record each batch with `record_batch`, put the sampler into the `TorchState`, and call `set_epoch` at the end of
    an epoch. Its state is the epoch and the number of rows done; the order of the rows is computed from them, and is
    the same for every world size.

    Ranks take rows in turns, so their shares differ by at most one row and the last batches may be short. Other ranks
    may need one more step for a single last row each. A rank without such a row then sees one of its rows a second
    time, because no collective could complete without it. For this the sampler has to know the batch size, which it
    finds out by itself if a `DataLoader` uses it.

    Args:
        dataset: Anything with a length, which must not change.
        shuffle: Use a different order each epoch.
        seed: Seed of the order; the same on all ranks.
        batch_size: Rows a rank takes each step, if the sampler is not used through a `DataLoader`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, batch_size: int | None = None) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self.epoch = 0
        self._done = self._taken = 0
        self._drops_last = False
        self._passes = 1
        self._redistribute()

    # --- progress ----------------------------------------------------------------------

    @property
    def processed_num(self) -> int:
        """Number of rows of this epoch that are done, on all ranks together."""
        if self._drops_last:
            # shares are equal, and rows at their end that do not fill a batch are left out, on all ranks alike
            if self._taken and self._taken + (self.batch_size or 1) > self._share:
                return self._rows
            return self._base + self._taken * self.num_replicas
        return rows_done(self._rows, self._base, self._taken, self.rank, self.num_replicas, self._padded)

    @property
    def total_size(self) -> int:
        """Number of rows that were left when the world last changed or, if later, when the epoch began."""
        return self._rows - self._base

    @property
    def num_samples(self) -> int:
        """Largest share of any rank: the same everywhere, so that loops over it make equally many steps."""
        return (self.total_size + (0 if self._drops_last else self.num_replicas - 1)) // self.num_replicas

    @property
    def remaining_indices(self) -> list[int]:
        """Rows of all ranks that are left, in order."""
        return [int(row) for row in self._order[np.arange(self._base, self._rows)]]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; an epoch that has begun already keeps its number of rows done."""
        if epoch == self.epoch and 0 < self.processed_num < self._rows:
            return
        self.epoch = epoch
        self._done = 0
        self._redistribute()

    def record_batch(self, batch_idx: int, batch_size: int | None) -> None:
        """Record that all ranks have processed one more batch, which has `batch_size` rows on this rank.

        Raises:
            InvalidSettingsError: `batch_size` is None, as `loader.batch_size` is of a loader with a batch sampler.
        """
        if batch_size is None:
            raise InvalidSettingsError(
                "batch_size is None: a DataLoader with a batch_sampler has no batch_size; give the rows of this batch, "
                "or record their indices with record_indices"
            )
        self.record_indices(range(batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that this rank has processed these rows, the next ones of its share, and other ranks as many."""
        self._taken = min(self._taken + len(indices), self._share + self._padded)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's rows of a batch; batch 0 is the first one in this world and epoch."""
        start = batch_idx * batch_size
        stop = min(start + batch_size, self._share + self._padded)
        return self._rows_of(start, stop).tolist() if stop > start else []

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self._done = state_dict["processed_num"]
        self._redistribute()

    def reset(self) -> None:
        """Redistribute the remaining rows over the ranks of the present world."""
        self._done = self.processed_num
        self._redistribute()

    def _redistribute(self) -> None:
        position = process.require()
        self.rank, self.num_replicas = position.rank, position.size
        self._rows = len(self.dataset)
        self._base = min(self._done, self._rows)
        self._order = EpochOrder(self._rows, self.seed, self.epoch, self.shuffle)
        self._taken = 0
        self._set_shares()

    def _set_shares(self) -> None:
        left, size = self.total_size, self.num_replicas
        # a loader that drops its last batch must drop it on every rank, so all shares are as small as the smallest
        self._share = left // size if self._drops_last else share(left, self.rank, size)
        self._padded = not self._drops_last and needs_padding(left, self.rank, size, self.batch_size, self._passes)

    def split_batches(self, passes: int) -> None:
        """Set the number of parts in which a batch is processed; all ranks must have equally many parts to process."""
        if passes != self._passes:
            self._passes = passes
            self._set_shares()

    # --- rows -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        batches = calling_object(lambda caller: isinstance(caller, torch.utils.data.BatchSampler), within=1)
        if batches is not None and batches.sampler is self:
            self.batch_size, self._drops_last = batches.batch_size, batches.drop_last
            self._set_shares()
        stop = self._share + self._padded
        for start in range(0, stop, _CHUNK):
            yield from self._rows_of(start, min(stop, start + _CHUNK)).tolist()

    def __len__(self) -> int:
        return self.num_samples

    def _rows_of(self, start: int, stop: int) -> Indices:
        positions = np.arange(start, stop, dtype=np.int64) * self.num_replicas + self.rank
        if self._padded and stop > self._share:
            positions[-1] = self.rank % self.total_size
        return self._order[positions + self._base]
