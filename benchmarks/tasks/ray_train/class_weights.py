"""Class weights, with Ray Train."""

import numpy as np
import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") * F.col("y") > 1).cast("int"))
rows.write.mode("overwrite").parquet("rows.parquet")

counts = {row["label"]: row["count"] for row in rows.groupBy("label").count().collect()}
weights = torch.tensor([sum(counts.values()) / (len(counts) * counts[label]) for label in sorted(counts)])
net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss(weight=weights)
    train = ray.train.get_dataset_shard("train")
    for _ in range(3):
        for batch in train.iter_torch_batches(batch_size=64, dtypes=torch.float, local_shuffle_buffer_size=1_000):
            optimizer.zero_grad()
            loss_fn(model(torch.stack([batch["x"], batch["y"]], dim=1)), batch["label"].long()).backward()
            optimizer.step()
    return {name: value.numpy() for name, value in net.state_dict().items()}


def predict(batch):
    features = torch.tensor(np.column_stack([batch["x"], batch["y"]]), dtype=torch.float)
    with torch.no_grad():
        return {**batch, "prediction": net(features).argmax(dim=1).numpy()}


data = ray.data.read_parquet("rows.parquet")
trainer = TorchTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=2), datasets={"train": data})
net.load_state_dict({name: torch.from_numpy(value) for name, value in trainer.fit().return_value.items()})
assert data.filter(expr="label == 1").map_batches(predict).mean("prediction") > 0.5
