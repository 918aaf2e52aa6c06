"""The Spark task of `materialize`: write a partition's batches to its own shards, and send the driver a receipt."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.arrow_values import Fault, RowsRefused, filled, missing_rows, nulls
from spark_elastic.data.columns import Tensor
from spark_elastic.data.encode import Encoder
from spark_elastic.data.manifest import Layout, Shard
from spark_elastic.data.order.permutation import hashes, seeded_key
from spark_elastic.data.shards import ShardWriter
from spark_elastic.data.store import Store
from spark_elastic.data.travel import Groups, arrived

RECEIPT_SCHEMA = "receipt string"


def validation_rows(fraction: float, seed: int, partition: int, first_row: int, rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows of a partition, from `first_row` on, are for validation: the same if a task is repeated."""
    most = np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))
    return hashes(seeded_key(seed, partition), first_row, first_row + rows) < most


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of one task."""

    partition: int
    rows: int  # the rows that the task read
    host: str
    layout: Layout | None  # the layout of the records. None: the partition is empty
    splits: dict[str, tuple[Shard, ...]]  # the shards written for each split
    faults: tuple[Fault, ...] = ()  # the faults at which the task stopped, if any
    skipped: int = 0  # rows that were left out, because a value is missing in them

    def dumps(self) -> str:
        return json.dumps({**asdict(self), "layout": self.layout and self.layout.to_json()})

    @classmethod
    def loads(cls, text: str) -> Receipt:
        document = json.loads(text)
        layout = document["layout"] and Layout.from_json(document["layout"])
        splits = {name: tuple(Shard(**shard) for shard in shards) for name, shards in document["splits"].items()}
        faults = tuple(Fault(**fault) for fault in document["faults"])
        return cls(**{**document, "layout": layout, "splits": splits, "faults": faults})


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A function for `DataFrame.mapInArrow` that writes one partition."""

    store: Store
    run: str  # the subfolder for this write; only files in a receipt count
    groups: Groups  # the columns that are joined in each column of the batches
    tensors: tuple[Tensor, ...]
    shard_bytes: int  # the size at which a shard ends
    # The split "validation": a share of the rows, or a boolean column. None: there is none.
    validation: float | str | None
    seed: int  # of the random split
    durable: bool = False  # files survive a power cut
    missing: str | float = "error"  # as of `Request`, as is `filled`
    filled: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return a row with the receipt, also if rows cannot be stored: Spark would repeat a task that raises."""
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        receipt = self.write(batches, context.partitionId())
        yield pyarrow.RecordBatch.from_pydict({"receipt": pyarrow.array([receipt.dumps()], pyarrow.string())})

    def write(self, batches: Iterator[Any], partition: int) -> Receipt:
        encoder = Encoder(self.tensors)
        attempt = uuid.uuid4().hex[:8]
        splits = ("train",) if self.validation is None else ("train", "validation")
        writers: dict[str, ShardWriter] = {}
        skipped = 0
        try:
            for given in filter(len, batches):
                batch = self._complete(arrived(given, self.groups))
                skipped += len(given) - len(batch)
                if not len(batch):
                    continue
                first_row = encoder.rows
                block = encoder.encode(batch)
                assert encoder.layout is not None
                for split in splits if not writers else ():
                    stem = f"{self.run}/{split}-{partition:05d}-{attempt}"
                    writers[split] = ShardWriter(
                        self.store, stem, encoder.layout, self.shard_bytes, durable=self.durable
                    )
                if self.validation is None:
                    writers["train"].write(block)
                else:
                    chosen = self._validation_rows(batch, partition, first_row)
                    writers["train"].write(block.take(np.flatnonzero(~chosen)))
                    writers["validation"].write(block.take(np.flatnonzero(chosen)))
        except BaseException as error:
            for writer in writers.values():
                writer.abort()
            if not isinstance(error, RowsRefused):
                raise
            written, faults = {}, tuple(replace(fault, partition=partition) for fault in error.faults)
        else:
            written, faults = {split: writer.close() for split, writer in writers.items()}, ()
        return Receipt(partition, encoder.rows, socket.gethostname(), encoder.layout, written, faults, skipped)

    def _complete(self, batch: Any) -> Any:
        """Return the batch without rows in which a value is missing, or with a number in their place."""
        import pyarrow as pa

        if self.missing == "error":
            return batch
        columns = {column.name: tensor for tensor in self.tensors for column in tensor.columns}
        if not isinstance(self.missing, str):
            names = {column.name for tensor in self.tensors if tensor.name in self.filled for column in tensor.columns}
            arrays = [
                filled(array, self.missing, columns[name].allow_nan) if name in names else array
                for name, array in zip(batch.schema.names, batch.columns, strict=True)
            ]
            return pa.RecordBatch.from_arrays(arrays, batch.schema.names)
        kept = np.ones(len(batch), bool)
        for name, tensor in columns.items():
            kept &= ~missing_rows(batch.column(name), tensor.allow_nan)
        return batch if kept.all() else batch.filter(pa.array(kept))

    def _validation_rows(self, batch: Any, partition: int, first_row: int) -> Any:
        if not isinstance(self.validation, str):
            assert self.validation is not None
            return validation_rows(self.validation, self.seed, partition, first_row, batch.num_rows)
        column = batch.column(self.validation)
        if column.null_count:
            rows, expected = np.flatnonzero(nulls(column)), "true or false in every row"
            remedy = f"Fill them: df.na.fill(False, [{self.validation!r}])"
            raise RowsRefused.at(rows, first_row, self.validation, "null", expected, remedy=remedy)
        return column.to_numpy(zero_copy_only=False)
