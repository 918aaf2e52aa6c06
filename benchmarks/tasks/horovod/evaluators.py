"""A CrossValidator with Spark's evaluators, with Horovod."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
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
rows = spark.range(600).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int")).cache()
rows = rows.withColumn("label", F.col("label").cast("double"))  # an output takes the type of its label

net = Points()
estimator = TorchEstimator(
    num_proc=1,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.1),
    loss=nn.BCEWithLogitsLoss(),
    feature_cols=["x", "y"],
    label_cols=["label"],
    input_shapes=[[-1, 1], [-1, 1]],
    batch_size=64,
)
grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 3]).build()
evaluator = BinaryClassificationEvaluator(rawPredictionCol="label__output")
validator = CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2)
scored = validator.fit(rows).transform(rows)
scored = scored.withColumn("probability", 1 / (1 + F.exp(-F.col("label__output"))))
scored = scored.withColumn("prediction", (F.col("probability") > 0.5).cast("double"))
print(MulticlassClassificationEvaluator(metricName="f1").evaluate(scored))
print(BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored))
assert evaluator.setMetricName("areaUnderPR").evaluate(scored) > 0.95
