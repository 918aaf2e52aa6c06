"""AUC and F1 of held-out rows after each epoch, with Ray Train."""

import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryF1Score

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") + F.col("y") > 1).cast("int"))
rows.write.mode("overwrite").parquet("rows.parquet")

net = nn.Linear(2, 1)


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_fn = nn.BCEWithLogitsLoss()
    metrics = MetricCollection({"val_auc": BinaryAUROC(), "val_f1": BinaryF1Score()})
    history = []
    train, valid = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("valid")
    for _ in range(3):
        for batch in train.iter_torch_batches(batch_size=64, dtypes=torch.float, local_shuffle_buffer_size=1_000):
            logits = model(torch.stack([batch["x"], batch["y"]], dim=1)).squeeze(1)
            optimizer.zero_grad()
            loss_fn(logits, batch["label"]).backward()
            optimizer.step()
        with torch.no_grad():
            for batch in valid.iter_torch_batches(batch_size=64, dtypes=torch.float):
                logits = model(torch.stack([batch["x"], batch["y"]], dim=1)).squeeze(1)
                metrics.update(logits, batch["label"].int())
        history.append({name: value.item() for name, value in metrics.compute().items()})  # of both workers
        metrics.reset()
    return history


train, valid = ray.data.read_parquet("rows.parquet").train_test_split(0.2)
trainer = TorchTrainer(
    train_loop,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    datasets={"train": train, "valid": valid},
)
history = trainer.fit().return_value
print(history)
assert history[-1]["val_auc"] > 0.95
