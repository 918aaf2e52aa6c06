"""Go on from a fitted model, and train the last layer alone, with Horovod."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator, TorchModel
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select((F.col("id") % 2 + 1).alias("month"), F.randn(seed=1).alias("x"))
rows = rows.withColumn("y", 2 * F.col("x") + F.col("month"))


def fitted(net, month):
    estimator = TorchEstimator(
        num_proc=1,
        store=Store.create("/tmp/horovod"),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=50,
        epochs=1,
    )
    return estimator.fit(rows.where(F.col("month") == month))


january = fitted(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), 1)
january.write().overwrite().save("january")

february = fitted(TorchModel.load("january").getModel(), 2)  # perhaps a month later, in another program

net = february.getModel()
for parameter in net.get_submodule("0").parameters():
    parameter.requires_grad_(False)
head_only = fitted(net, 2)
weights = [model.getModel().get_parameter("0.weight") for model in (february, head_only)]
assert torch.equal(*weights)
assert head_only.getHistory()[0]["train"]["loss"] < january.getHistory()[0]["train"]["loss"]
