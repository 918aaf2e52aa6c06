"""Predictions of a stream, with Horovod: its model takes tables only, so batch by batch."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn


class Points(nn.Module):
    """Takes each column as an input of its own, as the estimator gives them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(2, 1)

    def forward(self, x, y):
        return self.layers(torch.cat([x, y], dim=1))


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(500).select("id", (F.randn(seed=1)).alias("x"), (F.randn(seed=2)).alias("y"))
labelled = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int"))
labelled = labelled.withColumn("label", F.col("label").cast("double"))  # an output takes the type of its label

net = Points()
estimator = TorchEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
    loss=nn.BCEWithLogitsLoss(),
    feature_cols=["x", "y"],
    label_cols=["label"],
    input_shapes=[[-1, 1], [-1, 1]],
    batch_size=50,
    epochs=1,
)
model = estimator.fit(labelled)


def score(batch, batch_id):
    scored = model.transform(batch).withColumn("probability", 1 / (1 + F.exp(-F.col("label__output"))))
    scored = scored.withColumn("prediction", (F.col("probability") > 0.5).cast("double"))
    scored.write.mode("append").parquet("scored")


rows.write.mode("overwrite").parquet("arriving")
arriving = spark.readStream.schema(rows.schema).parquet("arriving")
query = arriving.writeStream.foreachBatch(score).trigger(availableNow=True).start()
query.awaitTermination()
spark.read.parquet("scored").show(3)
assert spark.read.parquet("scored").where("prediction is not null").count() == 500
