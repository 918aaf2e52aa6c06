"""Petastorm's batched loader on Parquet files of the same rows, as Horovod's estimators set it up; prints JSON.

<python with petastorm> benchmarks/peer_petastorm.py A --rows 500000 --repeat 3
<python with petastorm> benchmarks/peer_petastorm.py sorted --rows 500000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from petastorm import TransformSpec, make_batch_reader
from petastorm.pytorch import BatchedDataLoader

BATCH = 1024
FILES = 2
"""Spark in local[2] writes as many. Row groups of 128 MB, as Spark's."""


def columns(shape: str, start: int, stop: int) -> pa.Table:
    """Rows `start`..`stop` of a table. A: 20 floats. B: an array of 784 floats. C: 3 KiB of bytes. All with a label."""
    random, rows = np.random.default_rng(start), stop - start
    label = {"label": np.arange(start, stop)}
    if shape in ("A", "sorted"):
        return pa.table({**{f"x{i}": random.random(rows, dtype=np.float32) for i in range(20)}, **label})
    if shape == "B":
        values = pa.array(random.random(rows * 784, dtype=np.float32))
        return pa.table(
            {"x": pa.ListArray.from_arrays(np.arange(0, rows * 784 + 1, 784, dtype=np.int32), values), **label}
        )
    values = random.integers(0, 256, (rows, 3072), dtype=np.uint8)
    return pa.table({"x": pa.array([row.tobytes() for row in values], pa.binary()), **label})


def decoded(frame):
    frame["x"] = frame["x"].map(lambda value: np.frombuffer(value, np.uint8))
    return frame


def loader(folder: str, shape: str, rows: int) -> BatchedDataLoader:
    spec = None
    if shape == "C":
        spec = TransformSpec(decoded, edit_fields=[("x", np.uint8, (3072,), False)])
    reader = make_batch_reader(
        f"file://{folder}", num_epochs=1, workers_count=10, reader_pool_type="thread", transform_spec=spec
    )
    # Horovod: as many rows as a worker has, up to what fits into memory
    return BatchedDataLoader(reader, batch_size=BATCH, shuffling_queue_capacity=min(rows, 100_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=["A", "B", "C", "sorted"])
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for file in range(FILES):
            start, stop = (args.rows * edge // FILES for edge in (file, file + 1))
            table = columns(args.shape, start, stop)
            group = max(1, (128 << 20) // (table.nbytes // len(table)))
            pq.write_table(table, Path(folder) / f"{file}.parquet", row_group_size=group, compression="snappy")
        if args.shape == "sorted":
            with loader(folder, args.shape, args.rows) as batches:
                labels = np.array([batch["label"].numpy() for batch in batches if len(batch["label"]) == BATCH])
            print(json.dumps({"labels": [(batch * 10 // args.rows).tolist() for batch in labels]}))
            return
        seconds = []
        for _ in range(3 * args.repeat):
            seen = 0
            began = time.perf_counter()
            with loader(folder, args.shape, args.rows) as batches:
                for batch in batches:
                    seen += len(batch["label"])
            if seen == args.rows:  # on a busy machine its reader may think that it has ended before it began
                seconds.append(time.perf_counter() - began)
            if len(seconds) == args.repeat:
                break
        print(json.dumps({"rows": args.rows, "seconds": seconds}))


if __name__ == "__main__":
    main()
