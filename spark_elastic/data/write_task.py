"""What runs in a Spark task: a partition's batches into shards of its own, and a receipt for the driver."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.arrow_values import Fault, RowsRefused
from spark_elastic.data.columns import Tensor
from spark_elastic.data.encode import Encoder
from spark_elastic.data.layout import Layout
from spark_elastic.data.manifest import Shard
from spark_elastic.data.order.permutation import hashes, seeded_key
from spark_elastic.data.shards import ShardWriter
from spark_elastic.data.store import Store

# Which rows are set aside for validation: a hash of where they lie, so that a repeated task decides alike.


def validation_rows(fraction: float, seed: int, partition: int, first_row: int, rows: int) -> npt.NDArray[np.bool_]:
    """Whether each of `rows` rows of a partition, from `first_row` on, is for validation. bool, shape (rows,)."""
    return hashes(seeded_key(seed, partition), first_row, first_row + rows) < np.uint64(
        min(int(fraction * 2.0**64), (1 << 64) - 1)
    )


RECEIPT_SCHEMA = "receipt string"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a task did. rows: that it looked at. layout: None: it saw none. Faults, if any, mean that it stopped."""

    partition: int
    rows: int
    host: str
    layout: Layout | None
    splits: dict[str, tuple[Shard, ...]]
    faults: tuple[Fault, ...] = ()

    def dumps(self) -> str:
        return json.dumps(
            {
                "partition": self.partition,
                "rows": self.rows,
                "host": self.host,
                "layout": self.layout and self.layout.to_json(),
                "splits": {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()},
                "faults": [asdict(fault) for fault in self.faults],
            }
        )

    @classmethod
    def loads(cls, text: str) -> Receipt:
        document = json.loads(text)
        return cls(
            document["partition"],
            document["rows"],
            document["host"],
            document["layout"] and Layout.from_json(document["layout"]),
            {name: tuple(Shard(**shard) for shard in shards) for name, shards in document["splits"].items()},
            tuple(Fault(**fault) for fault in document["faults"]),
        )


@dataclass(frozen=True, slots=True)
class WriteTask:
    """store: the set's folder. run: the folder in it for this write; what other attempts leave there does not count.
    columns: what the batches' columns are called; Spark sends them in this order, under names of its own.
    durable: what is written survives a power cut.
    """

    store: Store
    run: str
    columns: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    shard_bytes: int
    validation: float | str | None
    seed: int
    durable: bool = False

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """For `DataFrame.mapInArrow`: one row, the receipt.

        Rows that cannot be stored are reported, not raised: Spark would repeat the task, and find the same.
        """
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        receipt = self.write(batches, context.partitionId())
        yield pyarrow.RecordBatch.from_pydict({"receipt": pyarrow.array([receipt.dumps()], pyarrow.string())})

    def write(self, batches: Iterator[Any], partition: int) -> Receipt:
        import pyarrow

        encoder = Encoder(self.tensors)
        attempt = uuid.uuid4().hex[:8]
        splits = ("train",) if self.validation is None else ("train", "validation")
        writers: dict[str, ShardWriter] = {}
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                batch = pyarrow.RecordBatch.from_arrays(batch.columns, names=self.columns)
                first_row = encoder.rows
                block = encoder.encode(batch)
                if not writers:
                    assert encoder.layout is not None
                    for split in splits:
                        stem = f"{self.run}/{split}-{partition:05d}-{attempt}"
                        writers[split] = ShardWriter(
                            self.store, stem, encoder.layout, self.shard_bytes, durable=self.durable
                        )
                if self.validation is None:
                    writers["train"].write(block)
                else:
                    aside = self._aside(batch, partition, first_row)
                    writers["train"].write(block.take(np.flatnonzero(~aside)))
                    writers["validation"].write(block.take(np.flatnonzero(aside)))
        except RowsRefused as refused:
            _abort(writers)
            faults = tuple(Fault(**{**asdict(fault), "partition": partition}) for fault in refused.faults)
            return Receipt(partition, encoder.rows, socket.gethostname(), encoder.layout, {}, faults)
        except BaseException:
            _abort(writers)
            raise
        written = {split: writer.close() for split, writer in writers.items()}
        return Receipt(partition, encoder.rows, socket.gethostname(), encoder.layout, written)

    def _aside(self, batch: Any, partition: int, first_row: int) -> Any:
        """Which rows of the batch are for validation."""
        if not isinstance(self.validation, str):
            assert self.validation is not None
            return validation_rows(self.validation, self.seed, partition, first_row, batch.num_rows)
        column = batch.column(self.validation)
        if column.null_count:
            row = first_row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise RowsRefused(Fault(self.validation, column.null_count, row, "null", "true or false in every row"))
        return column.to_numpy(zero_copy_only=False)


def _abort(writers: dict[str, ShardWriter]) -> None:
    for writer in writers.values():
        writer.abort()
