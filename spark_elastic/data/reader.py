"""Reads the batches of a materialised set: the same global batches for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.batch import Batch, Turn
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.files import SplitFiles
from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.data.order.permutation import GlobalOrder, Order
from spark_elastic.data.order.sampling import Indices
from spark_elastic.data.order.windows import LaneOrder, LaneSettings
from spark_elastic.data.prefetch import Buffers, Prefetcher
from spark_elastic.data.read_ahead import Ahead, Stopped
from spark_elastic.data.read_order import lanes_of, resolve_order
from spark_elastic.errors import InvalidSettingsError, nearest

_TURN_ROWS = 1 << 14
"""Rows that are gathered at a time where batches are smaller: what one turn costs besides its rows (a hand-over
between threads, some dozen calls) is then shared by several batches."""
_PLANNED_ROWS = 1 << 16
"""Rows whose numbers are computed at a time: gathering pushes what that needs out of the cache."""
_TURN_BYTES = 4 << 20
"""But no more than this, so that what was gathered is still in the cache when it is used."""
_AHEAD_BYTES = 4 << 20
"""Nor is more than this gathered ahead, besides one turn: more buffers only push each other out of the cache."""


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
        shuffle: another order each epoch. Otherwise rows come as they lie in the files.
        order: "global": a true permutation of all rows. "lanes": for sets that do not fit into memory, or are remote:
            shuffled in windows, see `LaneOrder`. "auto": `resolve_order`.
        lanes: how lanes are cut; None: `lanes_of`. The same on all ranks, and for all of a training.
        prefetch: batches that a thread gathers ahead, fewer if they are large, more if they are small; 0: no thread.
        fields: the tensors that batches hold; None: all.
        cache_dir, cache_bytes: where, and how much of, remote sets are kept on this host's disk; None: a folder of
            the user's temporary files, and most of what is free there. Sets that nobody opened for a week go.

    Raises:
        InvalidSettingsError: a value that cannot be, a split or a field that the set does not have.
        DatasetError: a shard is missing or damaged.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str = "train",
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        order: str = "auto",
        lanes: LaneSettings | None = None,
        prefetch: int = 3,
        fields: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if split not in dataset.splits:
            raise InvalidSettingsError(f"the set has no split {split!r}, but {', '.join(map(repr, dataset.splits))}")
        if prefetch < 0:
            raise InvalidSettingsError(f"prefetch must not be negative, not {prefetch}")
        self.batch_size = _checked_batch_size(batch_size)
        self.seed = seed
        self.shuffle = shuffle
        self.rows = dataset.rows(split)
        self.order = resolve_order(dataset, split, order=order, shuffle=shuffle, cache_bytes=cache_bytes)
        self.fields = _chosen(dataset, fields)
        self._lanes = lanes or lanes_of(dataset, split, cache_bytes=cache_bytes)
        self._prefetch = prefetch
        self._dtype = dataset.layout.dtype
        self._buffers = Buffers(keep=prefetch + 3)
        self._running: set[Prefetcher[Turn]] = set()
        self._closed = False
        self.set_world(rank, size)
        sidecars = any(field.kind is not Kind.DENSE for field in self.fields)
        self._files = SplitFiles(dataset, split, sidecars, cache_dir, cache_bytes)

    def set_world(self, rank: int, size: int) -> None:
        """From the next batch on, be rank `rank` of `size`. To be called between batches."""
        if not 0 <= rank < size:
            raise InvalidSettingsError(f"rank {rank} is not one of {size}")
        self._world = (rank, size)

    @property
    def rank(self) -> int:
        return self._world[0]

    @property
    def size(self) -> int:
        return self._world[1]

    def bring(self) -> None:
        """Bring the rows near, where all of them are needed at once; the first batch waits for them otherwise.

        Raises: DatasetError, StoreError: they cannot be had.
        """
        if self.order == "global":
            self._files.ahead().prepare(self._order_of(0), 0, 0, self.rank, self.size)

    def checked(self, timeout_s: float | None = None) -> bool:
        """Wait until the files were compared with the manifest's checksums, as an epoch that is read to its end does.

        timeout_s: 0: only look; None: as long as it takes.
        Returns: whether they were.
        Raises: DatasetError: one is not what was written.
        """
        return self._files.checked(timeout_s)

    def epoch(self, epoch: int, position: int = 0, *, batch_size: int | None = None) -> Generator[Batch]:
        """The global batches from `position` on: this rank's rows of each.

        batch_size: another one for this pass.

        Raises: InvalidSettingsError: a position outside of the epoch; ValueError: the reader is closed.
        """
        if self._closed:
            raise ValueError("the reader is closed")
        if not 0 <= position <= self.rows:
            raise InvalidSettingsError(f"position {position} is not one of an epoch of {self.rows} rows")
        batch_size = self.batch_size if batch_size is None else _checked_batch_size(batch_size)
        return self._batches(epoch, position, batch_size)

    def _batches(self, epoch: int, position: int, batch_size: int) -> Generator[Batch]:
        while position < self.rows:
            world = self._world
            ahead = self._files.ahead()
            made = partial(self._turns, ahead, epoch, position, batch_size, *world)
            turns = self._started(made, batch_size, ahead.stop)
            try:
                for turn in turns:
                    self._files.checked(0)
                    for batch in turn.batches():
                        position = batch.stop
                        yield batch
                        self._refuse_closed()
                        if self._world is not world:
                            break
                    if self._world is not world:
                        break  # what was gathered ahead is another rank's by now
                self._refuse_closed()
            finally:
                if isinstance(turns, Prefetcher):
                    self._running.discard(turns)
                    turns.close()
        self._files.checked(None)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError("the reader was closed in the middle of an epoch")

    def _started(
        self, turns: Callable[[], Iterator[Turn]], batch_size: int, stop: Callable[[], None]
    ) -> Iterator[Turn]:
        """The turns, gathered ahead by a thread if there is to be one."""
        if not self._prefetch:
            return turns()
        turn_batches, turn_rows = self._together(batch_size, self.size)
        ahead = min(-(-self._prefetch // turn_batches), _AHEAD_BYTES // (turn_rows * self._dtype.itemsize))
        started = Prefetcher(turns, max(1, ahead), "spark-elastic-reader", stop)
        self._running.add(started)
        return started

    def _together(self, batch_size: int, size: int) -> tuple[int, int]:
        """Global batches of a turn, and a rank's rows in them."""
        mine = -(-batch_size // size)
        batches = max(1, min(_TURN_ROWS, _TURN_BYTES // self._dtype.itemsize) // mine)
        return batches, batches * mine

    def _turns(self, ahead: Ahead, epoch: int, position: int, batch_size: int, rank: int, size: int) -> Iterator[Turn]:
        order, windows = self._order_of(epoch), self._order_of(epoch)  # one for each of the threads
        together, turn_rows = self._together(batch_size, size)
        planned = max(1, _PLANNED_ROWS // turn_rows) * together * batch_size

        def plans() -> Iterator[tuple[list[int], Indices, list[int]]]:
            for begin in range(position, self.rows, planned):
                edges = [*range(begin, min(begin + planned, self.rows), batch_size), min(begin + planned, self.rows)]
                numbers, counts = order.take(edges, rank, size)
                yield edges, numbers if self.shuffle else self._files.numbering.in_file_order(numbers), counts

        # with a thread of its own, what the order costs does not add to what the gather costs
        planning = Prefetcher(plans, 1, "spark-elastic-order") if self._prefetch else None
        try:
            for edges, numbers, counts in planning or plans():
                done = 0
                for first in range(0, len(counts), together):
                    part = counts[first : first + together]
                    bounds = edges[first : first + together + 1]
                    ahead.prepare(windows, bounds[0], bounds[-1], rank, size)
                    yield Turn(self._gathered(numbers[done : done + sum(part)]), bounds, part)
                    done += sum(part)
        except Stopped:
            return
        finally:
            if planning is not None:
                planning.close()
            ahead.forget()

    def _order_of(self, epoch: int) -> Order:
        if self.order == "lanes":
            return LaneOrder(self.rows, self.seed, epoch, self._lanes)
        return GlobalOrder(self.rows, self.seed, epoch, self.shuffle)

    def _gathered(self, numbers: Indices) -> dict[str, Any]:
        """The tensors of these rows."""
        nbytes = len(numbers) * self._dtype.itemsize
        out: npt.NDArray[Any] = self._buffers.take(nbytes)[:nbytes]
        self._files.rows.take(numbers, out.view(np.dtype((np.void, self._dtype.itemsize))))
        records = out.view(self._dtype)
        tensors: dict[str, Any] = {field.name: records[field.name] for field in self.fields}
        if self._files.sidecars is not None:
            shards = self._files.numbering.places(numbers)[0]
            for field in self.fields:
                if field.kind is not Kind.DENSE:
                    tensors[field.name] = self._files.sidecars.values(field, tensors[field.name], shards)
        return tensors

    def close(self) -> None:
        """Stop reading and let go of the files. Batches that were handed over stay as they are."""
        self._closed = True
        for turns in list(self._running):
            turns.close()
        self._running.clear()
        self._files.close()

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _checked_batch_size(batch_size: int) -> int:
    if batch_size < 1:
        raise InvalidSettingsError(f"batch_size must be at least 1, not {batch_size}")
    return batch_size


def _chosen(dataset: Dataset, names: Sequence[str] | None) -> tuple[TensorField, ...]:
    known = [field.name for field in dataset.layout.fields]
    for name in names or ():
        if name not in known:
            close = nearest(name, known)
            hint = f"; did you mean {close!r}?" if close else f", but {', '.join(map(repr, known))}"
            raise InvalidSettingsError(f"the set has no tensor {name!r}{hint}")
    return tuple(field for field in dataset.layout.fields if names is None or field.name in names)
