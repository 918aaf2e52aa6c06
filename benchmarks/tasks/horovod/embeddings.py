"""Ids and numbers as inputs, with embeddings, with Horovod."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn

USERS, ITEMS = 100, 50


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.head = nn.Linear(8 + 8 + 2, 1)

    def forward(self, user, item, price, age):
        user, item = self.user(user.long()), self.item(item.long())
        return self.head(torch.cat([user, item, price, age], dim=1))


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(
    (F.rand(seed=1) * USERS).cast("int").alias("user"),
    (F.rand(seed=2) * ITEMS).cast("int").alias("item"),
    F.rand(seed=3).alias("price"),
    F.rand(seed=4).alias("age"),
)
rows = rows.withColumn("rating", F.col("item") % 5 + F.col("price"))

net = Ratings()
estimator = TorchEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.02),
    loss=nn.MSELoss(),
    feature_cols=["user", "item", "price", "age"],
    label_cols=["rating"],
    input_shapes=[[-1], [-1], [-1, 1], [-1, 1]],
    batch_size=64,
    epochs=3,
)
model = estimator.fit(rows)
model.transform(rows).select("user", "item", "rating", "rating__output").show(3)
history = model.getHistory()
assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
