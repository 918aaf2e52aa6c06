"""Tuning with Optuna, with Horovod."""

import optuna
import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn


class Points(nn.Module):
    """Takes each column as an input of its own, as the estimator gives them."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x, y):
        return self.layers(torch.cat([x, y], dim=1))


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") * F.col("y") > 0).cast("int")).cache()


def objective(trial):
    net = Points(trial.suggest_int("width", 4, 64, log=True))
    estimator = TorchEstimator(
        num_proc=1,
        store=Store.create("/tmp/horovod"),
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)),
        loss=lambda output, label: nn.functional.cross_entropy(output, label.long()),
        feature_cols=["x", "y"],
        label_cols=["label"],
        input_shapes=[[-1, 1], [-1, 1]],
        validation=0.2,
        batch_size=trial.suggest_categorical("batch_size", [32, 128]),
        epochs=2,
        verbose=0,
    )
    return estimator.fit(rows).getHistory()[-1]["validation"]["loss"]


study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=3)
print(study.best_params, study.best_value)
assert len(study.trials) == 3
