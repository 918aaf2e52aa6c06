"""Read the batches of a materialised dataset: the same global batches for any number of ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.files import SplitFiles, least_cache_bytes
from spark_elastic.data.manifest import Kind, Manifest, TensorField
from spark_elastic.data.order.permutation import GlobalOrder, Indices
from spark_elastic.data.order.shares import Shares, most_rows
from spark_elastic.data.order.windows import Order, WindowedShuffle, WindowSettings, window_settings
from spark_elastic.data.prefetch import Buffers, Prefetcher, ReadAhead, Stopped
from spark_elastic.data.remote_cache import check_cache_bytes
from spark_elastic.errors import InvalidSettingsError, nearest

if TYPE_CHECKING:
    from spark_elastic.data.dataset import Dataset

GLOBAL_BYTES = 4 << 30  # datasets up to this size are expected to fit into the page cache of every host
_World = tuple[int, int, Shares]  # rank, size and shares
_GROUP_ROWS = 1 << 14  # gathered at a time: small batches share a hand-over between threads and some dozen calls
_GROUP_BYTES = 4 << 20  # the limit of a group: its rows are still in the processor's cache when they are used
_AHEAD_BYTES = 8 << 20  # of groups gathered ahead, unless a batch has more: others evict them from that cache


@dataclass(slots=True, eq=False)
class Batch:
    """One rank's rows of one global batch.

    Attributes:
        tensors: By field name: arrays `[rows, *shape]` for dense and sparse fields; lists of `bytes`, `str` or arrays
            for fields of variable length. Arrays are views into a buffer that is used again once nothing refers to
            them, so a batch can be kept without copying it.
        rows: Rows of this rank; 0 on some ranks if a last batch has fewer rows than there are ranks.
        global_rows: Rows of all ranks together.
        start: The position in the epoch's order at which the global batch starts.
        stop: The position at which it ends, and from which to resume after the batch was applied.
    """

    tensors: Mapping[str, Any]
    rows: int
    global_rows: int
    start: int
    stop: int

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


def _split(tensors: Mapping[str, Any], edges: Sequence[int], counts: Sequence[int]) -> Iterator[Batch]:
    """Divide rows that were gathered together into batches.

    `edges` are the positions between the global batches, and `counts` this rank's rows of each. At its end the
    generator refers to no rows any more, so their buffer can be used again.
    """
    start, first = edges[0], 0
    for stop, count in zip(edges[1:], counts, strict=True):
        last = first + count
        rows = {name: values[first:last] for name, values in tensors.items()}
        yield Batch(rows, count, stop - start, start, stop)
        start, first = stop, last


def resolve_order(
    dataset: Dataset, split: str = "train", *, order: str = "auto", shuffle: bool = True, cache_bytes: int | None = None
) -> str:
    """Return the order of a split, "global" or "lanes": the same on every process, and "global" without a shuffle.

    Args:
        dataset: A `Dataset`.
        split: The split that is read.
        order: "global", "lanes" or "auto", as of `BatchReader`.
        shuffle: Whether rows are shuffled.
        cache_bytes: The limit of a remote dataset's cache. A shuffle takes rows from all shards, so they must fit.

    Raises:
        InvalidSettingsError: An unknown order, "lanes" without a shuffle, or a shuffle that the cache cannot hold.
    """
    if order not in ("auto", "global", "lanes"):
        raise InvalidSettingsError(f"order must be 'auto', 'global' or 'lanes', not {order!r}")
    if not shuffle:
        if order == "lanes":
            raise InvalidSettingsError("order='lanes' shuffles rows; with shuffle=False use order='auto'")
        return "global"
    if not dataset.store.is_local:
        check_cache_bytes(cache_bytes, least_cache_bytes(dataset.manifest, split, None), split)
    if order != "auto":
        return order
    return "global" if dataset.manifest.nbytes(split) <= GLOBAL_BYTES else "lanes"


def least_cache_of_reader(
    dataset: Dataset, split: str, *, batch_size: int, prefetch: int = 3, shuffle: bool = True
) -> int:
    """Return the least `cache_bytes` of a `BatchReader` with these arguments, whatever the number of ranks."""
    if shuffle:
        return least_cache_bytes(dataset.manifest, split, None)
    row_bytes = _row_bytes(dataset.manifest, split, dataset.manifest.layout.fields)
    return least_cache_bytes(dataset.manifest, split, _rows_at_once(batch_size, row_bytes, prefetch))


def _group_batches(rows: int, row_bytes: int) -> int:
    return max(1, min(_GROUP_ROWS, _GROUP_BYTES // row_bytes) // max(1, rows))


def _groups_ahead(batches: int, prefetch: int) -> int:
    wanted = -(-prefetch // batches)
    # with one group, the thread waits for the consumer before it begins the next one
    return max(2, wanted) if prefetch and batches > 1 else wanted


def _rows_at_once(batch_size: int, row_bytes: int, prefetch: int) -> int:
    """Return the rows from the slowest rank of a host to the fastest one, in the order of the files.

    Ranks train in step, but one may have gathered all groups ahead, and another none. If the cache held less, the fast
    one would wait for the slow one, which would wait for room.
    """
    batches = _group_batches(batch_size, row_bytes)
    return (_groups_ahead(batches, prefetch) + 2) * batches * batch_size


def window_settings_of(dataset: Dataset, split: str = "train") -> WindowSettings:
    """Return how a reader divides a split for order "lanes"; the same for all readers."""
    return window_settings(dataset.manifest.rows(split), dataset.manifest.layout.stride)


class BatchReader:
    """Batches of one split, in an order that is a function of (seed, epoch) alone.

    ::

        with BatchReader(dataset, batch_size=1024, rank=rank, size=size) as reader:
            for batch in reader.epoch(0):
                step(batch["features_0"], batch["label_0"], weight=batch.rows / batch.global_rows)

    The state is (epoch, position): `reader.epoch(epoch, position)` resumes after the first `position` rows of that
    epoch's order, with any number of ranks.

    Args:
        dataset: A `Dataset`.
        split: The split to read.
        batch_size: Rows of a global batch, which the ranks share.
        rank: This process's rank.
        size: The number of ranks.
        seed: Of the order; the same on all ranks.
        shuffle: Another order each epoch. Otherwise rows come in the order of the files.
        order: "global": a true permutation of all rows. "lanes": shuffled in windows, for datasets that do not fit
            into memory or are remote, see `WindowedShuffle`. "auto": decided by `resolve_order`.
        lanes: How order "lanes" divides the dataset, the same on all ranks and for a whole training. None: decided by
            `window_settings_of`.
        prefetch: Batches that a thread gathers ahead: fewer if they are large, more if they are small. 0: no thread.
        fields: The tensors that batches contain. None: all.
        cache_dir: A folder of this host's disk for the cache of remote datasets. None: one in the user's temporary
            files. Datasets that nobody opened for a week are removed from it.
        cache_bytes: The limit of that cache, which all readers with that folder share. It must hold the shards that
            are read at the same time: all of a split with a shuffle, a few without. None: most of what is free on the
            disk.

    Raises:
        InvalidSettingsError: An impossible value, or a split or field that the dataset does not have.
        DatasetError: A shard is missing or damaged.
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
        lanes: WindowSettings | None = None,
        prefetch: int = 3,
        fields: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        manifest = dataset.manifest
        if split not in manifest.splits:
            known = ", ".join(map(repr, manifest.splits))
            raise InvalidSettingsError(f"the dataset has no split {split!r}; its splits are {known}")
        if prefetch < 0:
            raise InvalidSettingsError(f"prefetch must be at least 0, not {prefetch}")
        _check_batch_size(batch_size)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rows = manifest.rows(split)
        self.order = resolve_order(dataset, split, order=order, shuffle=shuffle, cache_bytes=cache_bytes)
        self.fields = _chosen_fields(manifest, fields)
        self._windows = lanes or window_settings_of(dataset, split)
        self._prefetch = prefetch
        self._dtype = manifest.layout.dtype
        self._row_bytes = _row_bytes(manifest, split, self.fields)
        self._buffers = Buffers(keep=max(prefetch, 2) + 3)  # those ahead, one being filled, the consumer's two
        self._running: set[Prefetcher[Iterator[Batch]]] = set()
        self._closed = False
        self.set_world(rank, size)
        sidecars = any(field.kind is not Kind.DENSE for field in self.fields)
        at_once = None if shuffle else _rows_at_once(self.batch_size, self._row_bytes, prefetch)
        self._files = SplitFiles(dataset.store, manifest, split, sidecars, cache_dir, cache_bytes, at_once)

    def set_world(self, rank: int, size: int, shares: Sequence[int] | None = None) -> None:
        """Be rank `rank` of `size` from the next batch on. To be called between batches, on all ranks alike.

        `shares` are the rows of each rank in a full batch, of which it takes that part; None: equal ones.
        """
        if not 0 <= rank < size:
            raise InvalidSettingsError(f"rank must be from 0 to {size - 1} with size={size}, not {rank}")
        if shares is not None and (len(shares) != size or min(shares) < 0 or not any(shares)):
            raise InvalidSettingsError(f"shares must be the rows of each of {size} ranks, not {list(shares)}")
        self.rank, self.size = rank, size
        self._world: _World = (rank, size, shares)

    def preload(self) -> None:
        """Read all rows if the order needs all at once. Otherwise the first batch would wait for that."""
        if self.order == "global":
            self._files.read_ahead().prepare(self._order_of(0), 0, 0, *self._world)

    def checked(self, timeout_s: float | None = None) -> bool:
        """Wait until the files have been compared with the manifest's checksums, and return whether they have been.

        The end of an epoch waits for this too.

        Args:
            timeout_s: The longest wait; 0: do not wait. None: as long as it takes.

        Raises:
            DatasetError: A file differs from what was written.
        """
        return self._files.checked(timeout_s)

    def epoch(self, epoch: int, position: int = 0, *, batch_size: int | None = None) -> Generator[Batch]:
        """Return this rank's rows of the global batches from `position` on.

        Args:
            epoch: The number of the epoch.
            position: Rows of the epoch's order to leave out.
            batch_size: Another batch size for this pass.

        Raises:
            InvalidSettingsError: The position is outside of the epoch.
            ValueError: The reader is closed.
        """
        if self._closed:
            raise ValueError("the reader is closed")
        if not 0 <= position <= self.rows:
            raise InvalidSettingsError(f"position must be from 0 to {self.rows}, the rows of an epoch, not {position}")
        if batch_size is not None:
            _check_batch_size(batch_size)
        return self._batches(epoch, position, batch_size or self.batch_size)

    def _batches(self, epoch: int, position: int, batch_size: int) -> Generator[Batch]:
        while position < self.rows:
            world = self._world
            ahead = self._files.read_ahead()
            mine = max(1, most_rows(batch_size, *world[1:]))
            # without a shuffle, groups do not depend on the number of ranks, so that `_rows_at_once` does not
            batches = _group_batches(mine if self.shuffle else batch_size, self._row_bytes)
            make = partial(self._groups, ahead, self._order_of(epoch), position, batch_size, batches, world)
            if self._prefetch:
                most = _AHEAD_BYTES // (batches * mine * self._row_bytes)
                depth = max(1, min(_groups_ahead(batches, self._prefetch), most))
                started = Prefetcher(make, depth, ahead.stop)
                self._running.add(started)
                groups: Iterator[Iterator[Batch]] = started
            else:
                groups = make()
            try:
                self._refuse_closed()  # `close` may have run just before it could know of these groups
                for group in groups:
                    self._files.checked(0)
                    for batch in group:
                        position = batch.stop
                        yield batch
                        self._refuse_closed()
                        if self._world is not world:
                            break
                    if self._world is not world:
                        break  # the groups gathered ahead belong to another rank now
                self._refuse_closed()
            finally:
                if isinstance(groups, Prefetcher):
                    self._running.discard(groups)
                    groups.close()
        self._files.checked(None)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError("the reader was closed in the middle of an epoch")

    def _groups(
        self, ahead: ReadAhead, order: Order, position: int, batch_size: int, batches: int, world: _World
    ) -> Iterator[Iterator[Batch]]:
        try:
            for begin in range(position, self.rows, batches * batch_size):
                end = min(begin + batches * batch_size, self.rows)
                edges = [*range(begin, end, batch_size), end]
                ahead.prepare(order, begin, end, *world)
                numbers, counts = order.take(edges, *world)
                yield _split(self._gathered(numbers), edges, counts)
        except Stopped:
            return
        finally:
            ahead.release_all()

    def _order_of(self, epoch: int) -> Order:
        if self.order == "lanes":
            return WindowedShuffle(self.rows, self.seed, epoch, self._windows)
        return GlobalOrder(self.rows, self.seed, epoch, self.shuffle)

    def _gathered(self, numbers: Indices) -> dict[str, Any]:
        nbytes = len(numbers) * self._dtype.itemsize
        out: npt.NDArray[Any] = self._buffers.acquire(nbytes)[:nbytes]
        self._files.rows.gather(numbers, out.view(np.dtype((np.void, self._dtype.itemsize))))
        records = out.view(self._dtype)
        tensors: dict[str, Any] = {field.name: records[field.name] for field in self.fields}
        if self._files.sidecars is not None:
            shards = self._files.numbering.places(numbers)[0]
            for field in self.fields:
                if field.kind is not Kind.DENSE:
                    tensors[field.name] = self._files.sidecars.values(field, tensors[field.name], shards)
        return tensors

    def close(self) -> None:
        """Stop reading and close the files. Batches that were returned stay valid."""
        self._closed = True
        for groups in list(self._running):
            groups.close()
        self._running.clear()
        self._files.close()

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _row_bytes(manifest: Manifest, split: str, fields: Sequence[TensorField]) -> int:
    """Return the bytes of a row of a batch: its record, and values of variable length, sparse ones densely.

    Values are counted with their mean over the split: of all fields of variable length together, also of those that
    are not read, because the manifest does not tell them apart.
    """
    sparse = [field for field in fields if field.kind is Kind.SPARSE]
    nbytes = manifest.layout.stride + sum(np.dtype((field.dtype, field.shape)).itemsize for field in sparse)
    if any(field.kind not in (Kind.DENSE, Kind.SPARSE) for field in fields):
        nbytes += sum(shard.sidecar_nbytes for shard in manifest.splits[split]) // max(1, manifest.rows(split))
    return nbytes


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InvalidSettingsError(f"batch_size must be at least 1, not {batch_size}")


def _chosen_fields(manifest: Manifest, names: Sequence[str] | None) -> tuple[TensorField, ...]:
    fields = manifest.layout.fields
    known = [field.name for field in fields]
    for name in names or ():
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean {close!r}?" if close else f"its tensors are {', '.join(map(repr, known))}"
            raise InvalidSettingsError(f"the dataset has no tensor {name!r}; {hint}")
    return tuple(field for field in fields if names is None or field.name in names)
