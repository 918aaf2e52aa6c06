"""AUC and F1 of held-out rows at the end, with Horovod: its metrics are means over batches."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
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
rows = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") + F.col("y") > 1).cast("int"))
# an output takes the type of its label
train, held_out = rows.withColumn("label", F.col("label").cast("double")).randomSplit([0.8, 0.2], seed=1)

net = Points()
estimator = TorchEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.1),
    loss=nn.BCEWithLogitsLoss(),
    feature_cols=["x", "y"],
    label_cols=["label"],
    input_shapes=[[-1, 1], [-1, 1]],
    batch_size=64,
    epochs=3,
)
scored = estimator.fit(train).transform(held_out)
scored = scored.withColumn("prediction", (F.col("label__output") > 0).cast("double"))
auc = BinaryClassificationEvaluator(rawPredictionCol="label__output").evaluate(scored)
f1 = MulticlassClassificationEvaluator(metricName="fMeasureByLabel", metricLabel=1.0).evaluate(scored)
print(round(auc, 3), round(f1, 3))
assert auc > 0.95
