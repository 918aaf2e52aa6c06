"""Class weights, with Horovod."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn


class Points(nn.Module):
    """Takes each column as an input of its own, as the estimator gives them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x, y):
        return self.layers(torch.cat([x, y], dim=1))


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") * F.col("y") > 1).cast("int"))

counts = {row["label"]: row["count"] for row in rows.groupBy("label").count().collect()}
weights = torch.tensor([sum(counts.values()) / (len(counts) * counts[label]) for label in sorted(counts)])

net = Points()
estimator = TorchEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
    loss=lambda output, label: nn.functional.cross_entropy(output, label.long(), weight=weights),
    feature_cols=["x", "y"],
    label_cols=["label"],
    input_shapes=[[-1, 1], [-1, 1]],
    batch_size=64,
    epochs=3,
)
outputs = vector_to_array("label__output")
scored = estimator.fit(rows).transform(rows.where("label = 1"))
recall = scored.agg(F.avg((outputs[1] > outputs[0]).cast("int"))).first()
assert recall[0] > 0.5
