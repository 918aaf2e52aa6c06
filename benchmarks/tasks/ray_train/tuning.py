"""Tuning with Optuna, with Ray Train."""

import optuna
import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") * F.col("y") > 0).cast("int")).cache()
rows.write.mode("overwrite").parquet("rows.parquet")
train, valid = ray.data.read_parquet("rows.parquet").train_test_split(0.2)


def train_loop(config):
    width = config["width"]
    model = prepare_model(nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loss_fn = nn.CrossEntropyLoss()
    shard, valid = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("valid")
    options = {"batch_size": config["batch_size"], "dtypes": torch.float}
    for _ in range(2):
        for batch in shard.iter_torch_batches(**options, local_shuffle_buffer_size=1_000):
            optimizer.zero_grad()
            loss_fn(model(torch.stack([batch["x"], batch["y"]], dim=1)), batch["label"].long()).backward()
            optimizer.step()
    losses = []
    with torch.no_grad():
        for batch in valid.iter_torch_batches(**options):
            outputs = model(torch.stack([batch["x"], batch["y"]], dim=1))
            losses.append(loss_fn(outputs, batch["label"].long()).item())
    return sum(losses) / len(losses)


def objective(trial):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "width": trial.suggest_int("width", 4, 64, log=True),
            "lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True),
            "batch_size": trial.suggest_categorical("batch_size", [32, 128]),
        },
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        datasets={"train": train, "valid": valid},
    )
    return trainer.fit().return_value


study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=3)
print(study.best_params, study.best_value)
assert len(study.trials) == 3
