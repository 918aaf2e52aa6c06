"""Horovod's TorchEstimator on the same table, in an environment of its own (see README.md); prints JSON.

<python with horovod> benchmarks/peer_horovod_estimator.py fit --rows 200000 --epochs 3 --repeat 3
<python with horovod> benchmarks/peer_horovod_estimator.py transform --rows 20000
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import LocalStore
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

FEATURES = 20


def table(spark, rows: int):
    """`rows` × 20 float features and a label that depends on them."""
    columns = [F.randn(seed=index).cast("float").alias(f"x{index}") for index in range(FEATURES)]
    df = spark.range(rows, numPartitions=2).select(*columns)
    return df.withColumn("label", (F.col("x0") + F.col("x1") * F.col("x2") > 0).cast("long"))


def estimator(store, epochs: int) -> TorchEstimator:
    torch.manual_seed(1)
    # each column arrives as an input of its own
    model = Stacked()
    return TorchEstimator(
        backend=SparkBackend(num_proc=2, verbose=0, stdout=sys.stderr, stderr=sys.stderr, use_gloo=True),
        store=store,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=cross_entropy,
        input_shapes=[[-1, 1]] * FEATURES,
        feature_cols=[f"x{index}" for index in range(FEATURES)],
        label_cols=["label"],
        batch_size=512,
        epochs=epochs,
        validation=None,
        verbose=0,
    )


class Stacked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, 256, 256)
        layers = [part for a, b in itertools.pairwise(widths) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(256, 2))

    def forward(self, *columns):
        return self.layers(torch.cat([column.float() for column in columns], dim=1))


def cross_entropy(output, label):
    return torch.nn.functional.cross_entropy(output, label.long())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("what", choices=["fit", "transform"])
    arguments.add_argument("--rows", type=int, default=200_000)
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--repeat", type=int, default=3)
    args = arguments.parse_args()
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    df = table(spark, args.rows).cache()
    df.count()
    df.rdd.map(lambda row: 1).count()  # Python workers are up
    walls = []
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "fit":
            for number in range(args.repeat):
                start = time.monotonic()
                estimator(LocalStore(f"{folder}/{number}"), args.epochs).fit(df)
                walls.append(time.monotonic() - start)
        else:
            model = estimator(LocalStore(folder), 1).fit(table(spark, 10_000))
            for _ in range(args.repeat):
                start = time.monotonic()
                model.transform(df).write.format("noop").mode("overwrite").save()
                walls.append(time.monotonic() - start)
    print(json.dumps({"what": args.what, "rows": args.rows, "epochs": args.epochs, "wall_s": walls}))
    spark.stop()


if __name__ == "__main__":
    main()
