"""Ids and numbers as two inputs, with embeddings, with Ray Train."""

import numpy as np
import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

USERS, ITEMS = 100, 50


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.head = nn.Linear(8 + 8 + 2, 1)

    def forward(self, ids, numbers):
        user, item = self.user(ids[:, 0]), self.item(ids[:, 1])
        return self.head(torch.cat([user, item, numbers], dim=1))


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(
    (F.rand(seed=1) * USERS).cast("int").alias("user"),
    (F.rand(seed=2) * ITEMS).cast("int").alias("item"),
    F.rand(seed=3).alias("price"),
    F.rand(seed=4).alias("age"),
)
rows = rows.withColumn("rating", F.col("item") % 5 + F.col("price"))
rows.write.mode("overwrite").parquet("rows.parquet")

net = Ratings()


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss_fn = nn.MSELoss()
    train = ray.train.get_dataset_shard("train")
    history = []
    for _ in range(3):
        losses = []
        for batch in train.iter_torch_batches(batch_size=64, dtypes=torch.float, local_shuffle_buffer_size=1_000):
            ids = torch.stack([batch["user"], batch["item"]], dim=1).long()
            loss = loss_fn(model(ids, torch.stack([batch["price"], batch["age"]], dim=1)).squeeze(1), batch["rating"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history.append(sum(losses) / len(losses))
    return {name: value.numpy() for name, value in net.state_dict().items()}, history


def predict(batch):
    ids = torch.tensor(np.column_stack([batch["user"], batch["item"]]))
    numbers = torch.tensor(np.column_stack([batch["price"], batch["age"]]), dtype=torch.float)
    with torch.no_grad():
        return {**batch, "prediction": net(ids, numbers).squeeze(1).numpy()}


data = ray.data.read_parquet("rows.parquet")
trainer = TorchTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=2), datasets={"train": data})
weights, history = trainer.fit().return_value
net.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
data.map_batches(predict).select_columns(["user", "item", "rating", "prediction"]).show(3)
assert history[-1] < history[0]
