"""Rows a second from a cached DataFrame into a set, and into Parquet by Spark, in turns; local[2].

A: 20 float columns and a long. B: array<float>[784] and a long. C: 3 KiB of binary and a long.
vectors: a dense vector of 784 and a long; the peer is the way of Horovod's estimators, a row at a time through an RDD
to lists, then Parquet.

The relative time is that of materialize() over the peer's, run by run; 0.5 is twice as fast.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks._harness import Series, parser, report
from spark_elastic.data.materialization import materialize

FEATURES = [f"f{index}" for index in range(20)]
ROWS = {"A": 2_000_000, "B": 80_000, "C": 50_000, "vectors": 40_000}
AT_LEAST = {"A": 1.4, "B": 2.5, "C": 1.0, "vectors": 8.0}


def table(spark: SparkSession, kind: str, rows: int) -> DataFrame:
    numbers = spark.range(0, rows, 1, 2)
    array = F.expr("transform(sequence(1, 784), i -> cast((id * i) % 251 as float))")
    values = {
        "A": [F.rand(index).cast("float").alias(name) for index, name in enumerate(FEATURES)],
        "B": [array.alias("x")],
        # random bytes: Parquet's compression is to find nothing
        "C": [F.expr("unhex(array_join(transform(sequence(1, 96), i -> sha2(id || '-' || i, 256)), ''))").alias("x")],
        "vectors": [array_to_vector(array.cast("array<double>")).alias("x")],
    }[kind]
    return numbers.select(*values, F.col("id").alias("label"))


def packed(df: DataFrame, kind: str, folder: str) -> None:
    tensors: dict[str, Any] = {"x": FEATURES if kind == "A" else "x", "label": "label"}
    dtypes = {} if kind == "C" else {"x": "float32"}
    materialize(df, tensors, store=folder, dtypes=dtypes)


def parquet(df: DataFrame, kind: str, folder: str) -> None:
    df.write.parquet(f"{folder}/parquet")


def row_by_row(df: DataFrame, kind: str, folder: str) -> None:
    lists = df.rdd.map(lambda row: (row.x.toArray().tolist(), row.label))
    df.sparkSession.createDataFrame(lists, "x array<float>, label long").write.parquet(f"{folder}/parquet")


def seconds(write: Callable[[DataFrame, str, str], None], df: DataFrame, kind: str) -> float:
    folder = tempfile.mkdtemp(prefix="data-write-")
    try:
        started = time.perf_counter()
        write(df, kind, folder)
        return time.perf_counter() - started
    finally:
        shutil.rmtree(folder)


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--scale", type=float, default=1.0, metavar="F", help="of the rows, for busy machines")
    arguments.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    args = arguments.parse_args()
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "6g")
    spark = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    series, raw = [], {}
    for kind in args.only:
        rows = int(ROWS[kind] * (0.1 if args.quick else args.scale))
        df = table(spark, kind, rows).cache()
        df.count()
        peer = row_by_row if kind == "vectors" else parquet
        ours, theirs = [], []
        for turn in range((1 if args.quick else args.repeat) + 1):
            times = seconds(packed, df, kind), seconds(peer, df, kind)
            if turn:  # the first compiles and starts Python
                ours.append(times[0])
                theirs.append(times[1])
                print(kind, *(f"{rows / second / 1e3:.1f} k rows/s" for second in times), file=sys.stderr, flush=True)
        relative = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        series += [
            Series(f"{kind}: materialize", [rows / second / 1e3 for second in ours], "k rows/s"),
            Series(f"{kind}: {peer.__name__}", [rows / second / 1e3 for second in theirs], "k rows/s"),
            Series(f"{kind}: relative time", relative, "of the peer's", target_p50=1 / AT_LEAST[kind]),
        ]
        raw[kind] = {"rows": rows, "materialize_s": ours, f"{peer.__name__}_s": theirs}
        df.unpersist(blocking=True)
    report("data-write", args, *series, raw=raw)
    spark.stop()


if __name__ == "__main__":
    main()
