"""Write a DataFrame as a dataset of packed records: one pass over the query, on the executors."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spark_elastic.clock import monotonic, wall
from spark_elastic.data import travel
from spark_elastic.data.arrow_values import Fault, error_of
from spark_elastic.data.catalog import collect_orphans, dataset_folder, leased, mark_used, may_be_lost
from spark_elastic.data.columns import Query, Request, cast_of
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import LAYOUT_VERSION, MANIFEST_NAME, Kind, Manifest
from spark_elastic.data.shards import SHARD_BYTES
from spark_elastic.data.shared_store import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.data.write_task import RECEIPT_SCHEMA, Receipt, WriteTask
from spark_elastic.errors import DataError, DatasetError, InvalidSettingsError, StoreError
from spark_elastic.spark.arrow_batches import small_batches
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.failures import has_lost_its_order, reason_of
from spark_elastic.spark.session import cluster_of

_log = logging.getLogger(__name__)
WRITES = 4  # attempts at most if executors are lost with shuffled rows of no fixed order; as many as of Spark's tasks
_TASKS_A_SLOT = 64  # with more partitions than this for each slot, several partitions make a task
_JOINED = 64  # of these at most, so that tasks stay small enough to be repeated
LONG_WRITE_S = 30.0  # a write that takes longer is worth a line that says how its rows can be kept
_writing: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()
"""Address of a dataset → the lock of the thread that writes it: of concurrent fits on the same rows, one writes."""
_collected: set[str] = set()  # addresses of the stores in which this process has deleted orphans


def materialize(
    df: Any,
    tensors: Mapping[str, str | Sequence[str]],
    *,
    store: str | Path | Store | None = None,
    storage_options: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    pad_to: Mapping[str, int] | None = None,
    variable: Sequence[str] = (),
    sparse: Mapping[str, bool] | None = None,
    allow_nan: bool | Sequence[str] = False,
    validation: float | str | None = None,
    seed: int = 0,
    dataset_id: str | None = None,
    keep: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
    pre_shuffle: str | None = None,
    verbose: int = 1,
) -> Dataset:
    """Write the rows of a DataFrame as a dataset, or return the one that was written under the `dataset_id`.

    Args:
        df: The DataFrame.
        tensors: By tensor name, a column, or a list of columns whose values are joined. One scalar column makes a
            scalar per row; in a list, even of one, scalars become an axis. Numbers, booleans, decimals (as float64),
            dates (days since 1970), timestamps (microseconds since 1970, UTC; both int64), arrays of these, vectors
            and binary must have the same length in all rows.
        store: The folder to write to, which executors and driver must share. None: this user's temporary folder, for
            local mode.
        storage_options: Options of fsspec's filesystem, as of `Store.create`.
        dtypes: By tensor, a dtype of numpy; default: that of the column. Values that it cannot represent are an
            error, also integers that it would round: float32 represents all integers up to 2**24 only.
        shapes: By tensor, the shape of a row's value, with as many elements as the value has.
        pad_to: By tensor, the length to which shorter arrays or binaries are padded with zeros.
        variable: Tensors, each of one binary or array column, whose rows keep their own lengths. Strings always do.
        sparse: By tensor of one vector column, whether to store only the non-zero values. Default: for vectors of more
            than 4,096 elements, if the first rows are mostly zeros.
        allow_nan: Whether NaN and infinity may be stored, in all tensors or in those named.
        validation: The split "validation": a share of the rows, drawn at random, or a boolean column that is true for
            its rows.
        seed: Of that draw, and of `pre_shuffle`.
        dataset_id: A name under which later calls, in this program or another, find the dataset, even if the rows of
            the DataFrame have changed since. None: the rows are written by each call.
        keep: Whether the dataset outlives this process. None: if it has a `dataset_id`.
        shard_bytes: The size at which a task ends a file and begins another.
        pre_shuffle: "spark": shuffle the rows before they are written, for sorted input that is larger than memory.
        verbose: 0: print nothing. 1: show the progress if it takes longer than a moment.

    Raises:
        InvalidSettingsError: A setting is impossible. Raised before anything runs.
        DataError: The schema has columns that cannot be stored, before anything runs. Or the rows have such values;
            with the column, the number of rows, what was found and what was expected.
        DatasetError: The dataset named `dataset_id` was written with other settings, or is damaged.
        StoreError: The executors do not see the store, or cannot write to it.
    """
    request = Request(
        tensors,
        dtypes=dtypes or {},
        shapes=shapes or {},
        pad_to=pad_to or {},
        variable=variable,
        sparse=sparse or {},
        allow_nan=allow_nan,
        validation=validation,
        seed=seed,
        shard_bytes=shard_bytes,
        pre_shuffle=pre_shuffle,
    )
    query, folder = Query.checked(df, request), Store.create(store, storage_options)
    kept = keep if keep is not None else dataset_id is not None
    return write_dataset(cluster_of(df.sparkSession), query, folder, dataset_id, kept, verbose)


def write_dataset(
    cluster: Cluster, query: Query, store: Store, dataset_id: str | None, kept: bool, verbose: int
) -> Dataset:
    """Do what `materialize` does, in a cluster that the caller has."""
    settings = query.request.to_json()
    if dataset_id is not None and (not re.fullmatch(r"[\w.=-]+", dataset_id) or dataset_id.startswith((".", "auto-"))):
        raise InvalidSettingsError(
            "dataset_id must be letters, digits, '_', '-', '=' and '.', and not start with '.' or 'auto-'; it is "
            f"{dataset_id!r}"
        )
    folder = dataset_folder(store, dataset_id or f"auto-{uuid.uuid4().hex}")
    with _writing.setdefault(folder.address, threading.Lock()):
        if dataset_id is not None and folder.exists(MANIFEST_NAME):
            dataset = Dataset.open(folder)
            _check_settings(dataset, settings, dataset_id)
            if may_be_lost(folder):
                dataset.verify()
            mark_used(folder, kept)
            _log.info("rows that were written before are read from %s", folder.url)
            return dataset
        ensure_shared(store, cluster)
        began = monotonic()
        try:
            with leased(folder):
                dataset = _Write(cluster, query, folder, kept, verbose).run()
                _check_settings(dataset, settings, dataset_id)  # another process may have written it meanwhile
            mark_used(folder, kept)
        except OSError as error:
            raise StoreError(f"the driver cannot write to {folder.url}: {error}") from error
        if verbose and (seconds := monotonic() - began) >= LONG_WRITE_S:
            how = f" to {folder.url}" if kept else "; dataset_id= keeps them"
            print(f"spark_elastic: rows written in {seconds:.0f} s{how}", file=sys.stderr, flush=True)
        if store.address not in _collected:
            _collected.add(store.address)
            collect_orphans(store)
        return dataset


def _key_of(settings: Mapping[str, Any]) -> str:
    """Return the key of a dataset's settings, which a later `materialize` with its `dataset_id` must have too."""
    return hashlib.sha256(json.dumps([LAYOUT_VERSION, settings], sort_keys=True, default=str).encode()).hexdigest()[:32]


def _check_settings(dataset: Dataset, settings: Mapping[str, Any], dataset_id: str | None) -> None:
    if dataset.manifest.key != _key_of(settings):
        written = dataset.manifest.about.get("settings", {})
        different = sorted(name for name in settings if written.get(name) != settings[name])
        raise DatasetError(
            f"the dataset {dataset_id!r} in {dataset.store.url} was written with other settings: "
            + ", ".join(f"{name}={written.get(name)!r}, not {settings[name]!r}" for name in different)
            + "; choose another dataset_id, or delete it"
        )


@dataclass(eq=False)
class _Write:
    """One write of a DataFrame's rows to a folder."""

    cluster: Cluster
    query: Query
    folder: Store
    kept: bool
    verbose: int

    def run(self) -> Dataset:
        from spark_elastic import __version__

        run, started, settings, folder = uuid.uuid4().hex[:12], wall(), self.query.request.to_json(), self.folder
        try:
            receipts = self._receipts(run)
            kinds = {(field.name, field.kind) for each in receipts if each.layout for field in each.layout.fields}
            mixed = [name for name, kind in kinds if kind is Kind.SPARSE and (name, Kind.DENSE) in kinds]
            if mixed:  # the first vectors were mostly zeros in some tasks only
                folder.delete(run)
                request = self.query.request
                request = replace(request, sparse={**request.sparse, **dict.fromkeys(mixed, True)})
                self.query = Query.checked(self.query.df, request)
                receipts = self._receipts(run)
            about = {
                "written_by": f"spark_elastic {__version__}",
                "application": self.cluster.application,
                "seconds": round(wall() - started, 3),
                "settings": settings,
            }
            manifest = _manifest(receipts, self.query.request, _key_of(settings), about)
            written = [
                (receipt.host, shard) for receipt in receipts for each in receipt.splits.values() for shard in each
            ]
            for host, shard in written:
                if folder.size(shard.file) != shard.nbytes:
                    raise StoreError(
                        f"{host} wrote {shard.file} to {folder.url}, but the driver does not see it as a whole; name a "
                        "store that driver and executors share"
                    )
        except BaseException:
            folder.delete(run)
            raise
        if folder.write_bytes(MANIFEST_NAME, manifest.dumps(), only_if_absent=True, durable=self.kept):
            # files of attempts that Spark repeated; those of attempts that still run are later deleted as orphans
            listed = manifest.files
            for entry in folder.list(run):
                if entry.path not in listed:
                    folder.delete(entry.path)
            return Dataset(folder, manifest)
        folder.delete(run)
        return Dataset.open(folder)  # another process wrote the same rows meanwhile

    def _receipts(self, run: str) -> list[Receipt]:
        """Run the query that writes the rows, below the folder `run`."""
        df, request, functions = self.query.df, self.query.request, self.cluster.functions
        types = {name: df.schema[name].dataType for name in request.columns}
        groups = travel.groups_of({name: cast_of(kind) or kind.typeName() for name, kind in types.items()})

        def column(name: str) -> Any:
            found = functions.col("`" + name.replace("`", "``") + "`")
            cast = cast_of(types[name])
            return found.cast(cast) if cast else found

        # under other names: mapInArrow does not find columns with dots or backticks in theirs
        columns = travel.expressions(groups, column, functions.array)
        rows = df.select(*(each.alias(f"c{index}") for index, each in enumerate(columns)))
        if request.pre_shuffle:
            # one draw decides the partition, another the place in it: a repartition alone keeps neighbours together
            rows = rows.repartition(functions.rand(request.seed))
            rows = rows.sortWithinPartitions(functions.rand(request.seed + 1))
        elif (found := self.cluster.partitions(rows)) is not None:
            partitions, slots = found
            if partitions > _TASKS_A_SLOT * slots:  # a task costs about 0.1 s besides its rows
                rows = rows.coalesce(max(-(-partitions // _JOINED), _TASKS_A_SLOT // 4 * slots))
        complete = (request.missing, tuple(request.filled))
        written = (request.shard_bytes, request.validation, request.seed, self.kept, *complete)
        task = WriteTask(self.folder, run, groups, self.query.tensors, *written)
        name = f"spark_elastic: write {', '.join(request.tensors)}"
        wide = any(column.source != "scalar" for tensor in self.query.tensors for column in tensor.columns)
        try:
            with small_batches(df.sparkSession) if wide else nullcontext():
                answers = write_again_if_order_is_lost(
                    lambda: self.cluster.collect(
                        rows.mapInArrow(task, RECEIPT_SCHEMA), name, "writing rows", self.verbose
                    ),
                    lambda: self.folder.delete(run),
                )
        except Exception as error:  # py4j, captured by pyspark or not
            failure, reason = reason_of(error)
            # the reason is Spark's own; the frames of its JVM, several screens of them, tell nothing more
            raise failure(f"the rows could not be written: {reason}") from (error if self.verbose > 1 else None)
        receipts = sorted((Receipt.loads(row.receipt) for row in answers), key=lambda receipt: receipt.partition)
        _refuse_faults(receipts)
        return receipts


def write_again_if_order_is_lost(write: Callable[[], list[Any]], clear: Callable[[], None]) -> list[Any]:
    """Run a query that writes; `clear` and repeat it if an executor was lost with shuffled rows of no fixed order."""
    for attempt in range(1, WRITES):
        try:
            return write()
        except Exception as error:  # py4j, captured by pyspark or not
            if not has_lost_its_order(error):
                raise
            _log.warning(
                "an executor was lost with randomly shuffled rows, which Spark cannot recompute in the same order; all "
                "rows are written again (attempt %d of %d)",
                attempt + 1,
                WRITES,
            )
            clear()
    return write()


def _refuse_faults(receipts: Sequence[Receipt]) -> None:
    seen, skipped = sum(receipt.rows for receipt in receipts), sum(receipt.skipped for receipt in receipts)
    if skipped:
        _log.warning(
            "%d of %d rows have a missing value (null, NaN or infinity) and are left out", skipped, seen + skipped
        )
    if faults := [fault for receipt in receipts for fault in receipt.faults]:
        raise error_of(faults, seen)
    if not seen:
        raise DataError("the DataFrame has no rows" + (" without a missing value" if skipped else ""))
    layouts = [(receipt, receipt.layout) for receipt in receipts if receipt.layout is not None]
    for index in range(len(layouts[0][1].fields)):
        counts: Counter[tuple[int, ...]] = Counter()
        for receipt, layout in layouts:
            counts[layout.fields[index].shape] += receipt.rows
        usual = counts.most_common(1)[0][0]
        for receipt, layout in layouts:
            field = layout.fields[index]
            if field.shape != usual:
                columns, found = ", ".join(field.columns), f"values of shape {list(field.shape)}"
                expected = f"shape {list(usual)} as in most partitions"
                remedy = "Store them padded (pad_to=) or with their own lengths (variable=)"
                faults.append(
                    Fault(columns, receipt.rows, 0, found, expected, remedy, receipt.partition, setting="pad_to")
                )
    if faults:
        raise error_of(faults, seen)


def _manifest(receipts: Sequence[Receipt], request: Request, key: str, about: Mapping[str, Any]) -> Manifest:
    layout = next(receipt.layout for receipt in receipts if receipt.layout is not None)
    names = ("train",) if request.validation is None else ("train", "validation")
    splits = {name: tuple(shard for receipt in receipts for shard in receipt.splits.get(name, ())) for name in names}
    manifest = Manifest(layout, splits, key, about)
    rows = sum(receipt.rows for receipt in receipts)
    for name in names:
        if not manifest.rows(name):
            raise DataError(
                f"validation={request.validation!r} leaves no row for the split {name!r}, of {rows:,} rows in all",
                rows=rows,
            )
    return manifest
