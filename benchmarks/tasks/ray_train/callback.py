"""Halve the learning rate on a plateau and stop early, with Ray Train: it has no callbacks in the workers."""

import ray.train
import torch
import torch.distributed as dist
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(F.randn(seed=1).alias("x"))
rows = rows.withColumn("y", 2 * F.col("x") + F.rand(seed=2))
rows.write.mode("overwrite").parquet("rows.parquet")

net = nn.Linear(1, 1)


def mean(losses):
    """Return the mean over the workers."""
    value = torch.stack(losses).mean()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.MSELoss()
    train, valid = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("valid")
    best, best_valid, waited = float("inf"), float("inf"), 0
    rates = []
    for epoch in range(5):
        losses = []
        for batch in train.iter_torch_batches(batch_size=50, dtypes=torch.float, local_shuffle_buffer_size=1_000):
            loss = loss_fn(model(batch["x"].unsqueeze(1)).squeeze(1), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        loss = mean(losses)
        with torch.no_grad():
            batches = valid.iter_torch_batches(batch_size=50, dtypes=torch.float)
            losses = [loss_fn(model(batch["x"].unsqueeze(1)).squeeze(1), batch["y"]) for batch in batches]
        valid_loss = mean(losses)
        if loss > best - 0.01:
            for group in optimizer.param_groups:
                group["lr"] /= 2
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']}")
        best = min(best, loss)
        waited = 0 if valid_loss < best_valid else waited + 1
        best_valid = min(best_valid, valid_loss)
        rates.append(optimizer.param_groups[0]["lr"])
        if waited >= 4 or loss < 0.01:
            break
    return rates


train, valid = ray.data.read_parquet("rows.parquet").train_test_split(0.1)
trainer = TorchTrainer(
    train_loop,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    datasets={"train": train, "valid": valid},
)
rates = trainer.fit().return_value
print(rates)
assert rates[-1] < rates[0]
