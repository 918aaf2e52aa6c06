# Databricks notebook source
# MAGIC %md
# MAGIC # A training that loses a worker and goes on
# MAGIC
# MAGIC Three workers train a network. In the middle of an epoch one of them is ended by `kill -9`, as a spot
# MAGIC instance or the kernel's out-of-memory killer would end it. The other two carry on with the same step a
# MAGIC moment later, and when the lost worker's replacement is ready, it joins them.

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Two spirals
# MAGIC Points on two arms that wind around each other, with some noise: no line parts them, a small network does.

# COMMAND ----------

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

random = np.random.default_rng(0)
angle = np.sqrt(random.uniform(size=30_000)) * 3 * np.pi
arm = random.integers(0, 2, size=angle.size)
points = pd.DataFrame(
    {
        "x": angle * np.cos(angle + np.pi * arm) / 10 + random.normal(scale=0.03, size=angle.size),
        "y": angle * np.sin(angle + np.pi * arm) / 10 + random.normal(scale=0.03, size=angle.size),
        "arm": arm,
    }
)
df = spark.createDataFrame(points)
sample = points.sample(3000, random_state=0)
sample.plot.scatter("x", "y", c="arm", s=2, cmap="coolwarm", colorbar=False, figsize=(3, 3))
plt.show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The kill
# MAGIC Callbacks run in the workers, on whatever machine those are. This one sends the worker of rank 1 a SIGKILL
# MAGIC at the 400th step that the three do together, in the middle of an epoch. Nothing can catch that: the process
# MAGIC is gone without a word, and with it its part of the batch.

# COMMAND ----------

import signal

from spark_elastic.ml.callbacks import Callback, Run


class KillRankOne(Callback):
    def __init__(self) -> None:
        self.together = 0  # steps that all three have done

    def on_batch_begin(self, run: Run) -> None:
        if run.size == 3:
            self.together += 1
            if run.rank == 1 and self.together == 400:
                os.kill(os.getpid(), signal.SIGKILL)


# COMMAND ----------

import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label).float()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
estimator = ElasticTorchEstimator(
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
    loss=nn.CrossEntropyLoss(),
    metrics={"accuracy": accuracy},
    feature_cols=["x", "y"],
    label_cols=["arm"],
    validation=0.1,
    batch_size=240,
    epochs=30,
    callbacks=[KillRankOne()],
    num_proc=3,
    min_num_proc=1,
)
model = estimator.fit(df)

# COMMAND ----------

# MAGIC %md
# MAGIC ## What happened
# MAGIC The picture has the loss and the accuracy by time, and on the same axis how many workers there were.

# COMMAND ----------

model.plot()

# COMMAND ----------

# MAGIC %md
# MAGIC `model.events` is the same story as records: who came, who left and why, and how long each pause was.

# COMMAND ----------

for event in model.events:
    print(f"{event['seconds']:5.1f} s  {event['text']}")

# COMMAND ----------

# MAGIC %md
# MAGIC No step was lost and no row was skipped: every epoch has used every row once, whoever was there to do it.

# COMMAND ----------

history = pd.DataFrame(model.history)
assert history["rows"].nunique() == 1
assert history["steps"].diff().dropna().nunique() == 1
history[["epoch", "steps", "rows", "seconds", "loss", "val_accuracy"]].iloc[[0, 3, 4, -1]].round(3)
