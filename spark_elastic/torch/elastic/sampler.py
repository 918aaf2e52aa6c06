"""A sampler that can be dealt out again, to any number of ranks, in the middle of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch.utils.data

from spark_elastic.collective.process import process
from spark_elastic.data.order.sampling import EpochOrder, Indices, needs_padding, rows_done, share
from spark_elastic.elastic.call_stack import calling_object

_CHUNK = 8192
"""Rows whose places in the order are computed at a time."""
_HISTORY = 256
"""Records that can be taken back."""


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the rows of a dataset out to the ranks, each once an epoch, however often the world changes.

    Record each batch with `record_batch`, put the sampler into the `TorchState`, and call `set_epoch` at the end of
    an epoch. The state is (epoch, rows done): the order is computed, not stored, and is the same for every world
    size.

    Ranks take rows in turns, so their shares differ by at most one row and the last batches may be short. If a share
    ends one whole batch before that of other ranks, which have one row each left for a last step, this rank sees one
    row a second time in that step, because no collective could complete without it: fewer rows than ranks, never more
    than once an epoch. That needs the batch size; a `DataLoader`'s is found by itself, otherwise give `batch_size`.

    Args:
        dataset: anything with a length, which must not change.
        shuffle: a different order each epoch.
        seed: of the order; the same on all ranks.
        batch_size: rows a rank takes a step, if the sampler is not used through a `DataLoader`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, batch_size: int | None = None) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.batch_size = batch_size
        self._before_step = 0
        self.epoch = 0
        self._done = 0
        self._drops_last = False
        self._passes = 1
        self._redeal()

    # --- where it stands ----------------------------------------------------------------------

    @property
    def processed_num(self) -> int:
        """Rows of this epoch that are done, on all ranks together."""
        if self._drops_last:
            # shares are equal, and rows that fill no batch of their share are left out: all ranks see that alike
            if self._taken and self._taken + (self.batch_size or 1) > self._share:
                return self._rows
            return self._base + self._taken * self.num_replicas
        return rows_done(self._rows, self._base, self._taken, self.rank, self.num_replicas, self._padded)

    @property
    def total_size(self) -> int:
        """Rows that were left when the world last changed, or the epoch began."""
        return self._rows - self._base

    @property
    def num_samples(self) -> int:
        """The largest share of any rank: the same everywhere, so that loops over it make equally many steps."""
        return (self.total_size + (0 if self._drops_last else self.num_replicas - 1)) // self.num_replicas

    @property
    def remaining_indices(self) -> list[int]:
        """The rows that are left, of all ranks, in order."""
        return [int(row) for row in self._order[np.arange(self._base, self._rows)]]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. An epoch that is already under way is not begun again: its rows stay done."""
        if epoch == self.epoch and 0 < self.processed_num < self._rows:
            return
        self.epoch = epoch
        self._done = 0
        self._redeal()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have processed one more batch, this one with `batch_size` rows."""
        self._record(batch_size)

    def record_indices(self, indices: Sequence[int]) -> None:
        """This rank has processed these rows, the next ones of its share, and the others as many."""
        self._record(len(indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's rows of one batch, counted from the last change of the world or the epoch's beginning."""
        start = batch_idx * batch_size
        stop = min(start + batch_size, self._share + self._padded)
        return self._rows_of(start, stop).tolist() if stop > start else []

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self._done = state_dict["processed_num"]
        self._redeal()

    def reset(self) -> None:
        """Deal out what is left to the ranks there are now."""
        self._done = self.processed_num
        self._redeal()

    def _redeal(self) -> None:
        position = process.require()
        self.rank, self.num_replicas = position.rank, position.size
        self._rows = len(self.dataset)
        self._base = min(self._done, self._rows)
        self._order = EpochOrder(self._rows, self.seed, self.epoch, self.shuffle)
        self._taken = 0
        self._deal()
        self.records = 0
        self._at_step = 0
        self._history: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_HISTORY)

    def _deal(self) -> None:
        left, size = self.total_size, self.num_replicas
        # a loader that drops its last batch must drop it on every rank, so all shares are the smallest one
        self._share = left // size if self._drops_last else share(left, self.rank, size)
        self._padded = not self._drops_last and needs_padding(left, self.rank, size, self.batch_size, self._passes)

    # --- records that belong to a step which is done again --------------------------------------

    def _record(self, rows: int) -> None:
        self._taken = min(self._taken + rows, self._share + self._padded)
        self.records += 1
        self._history.append((self.records, self._taken))

    def start_counting(self) -> None:
        """Count records from here: the state stands at a resume point."""
        self.records = 0
        self._at_step = 0
        self._history.clear()
        self._history.append((0, self._taken))

    def learn_records_before_step(self) -> None:
        """The first step since counting began is entered: what was recorded so far, the loop records before a step."""
        self._before_step = self.records

    def step_applied(self) -> None:
        self._at_step = self.records

    def drop_records_of_step(self) -> None:
        """Take back the records that belong to the step that is done again."""
        keep = self._at_step = max(self._at_step, self.records - self._before_step)
        if keep == self.records:
            return
        for number, taken in self._history:
            if number == keep:
                self.records, self._taken = number, taken
                return

    def split_batches(self, passes: int) -> None:
        """Each batch is worked through in this many parts; ranks must have equally many parts, not just batches."""
        if passes != self._passes:
            self._passes = passes
            self._deal()

    # --- rows -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        batches = calling_object(lambda caller: isinstance(caller, torch.utils.data.BatchSampler), within=1)
        if batches is not None and batches.sampler is self:
            self.batch_size, self._drops_last = batches.batch_size, batches.drop_last
            self._deal()
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
