# Databricks notebook source
# MAGIC %md
# MAGIC # A training loop of your own
# MAGIC
# MAGIC `spark_elastic.run` runs any function in Spark tasks, with gradients averaged between the workers and a
# MAGIC state that outlives them. Here that is a variational autoencoder, whose loss no estimator needs to know of:
# MAGIC it learns to draw digits.

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

import torch
from torch import nn
from torch.nn import functional as F


class Autoencoder(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(log_var / 2)
        reconstruction = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="none").sum(dim=1)
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(dim=1)
        loss: torch.Tensor = (reconstruction + divergence).mean()
        return loss


# COMMAND ----------

# MAGIC %md
# MAGIC ## The loop
# MAGIC Four things make an ordinary loop elastic: the optimizer is wrapped, the sampler deals the rows out to the
# MAGIC workers, what has to survive is in a `TorchState`, and the loop itself goes on from wherever that state
# MAGIC stands. `state.commit()` is where new workers are let in.

# COMMAND ----------

import numpy as np
from torch.utils.data import DataLoader, TensorDataset

import spark_elastic
import spark_elastic.torch as hvd


def train(images: np.ndarray, epochs: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    hvd.init()
    torch.manual_seed(hvd.rank())
    dataset = TensorDataset(torch.tensor(images))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, losses=[])

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> None:
        while state.epoch < epochs:
            for number, (x,) in enumerate(loader):
                optimizer.zero_grad()
                loss = model.loss(x)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, loader.batch_size)
                state.commit()
            with torch.no_grad():
                average = hvd.allreduce(model.loss(dataset.tensors[0])).item()
            if hvd.rank() == 0 and state.epoch % 10 == 0:
                print(f"epoch {state.epoch}: loss {average:.1f} with {hvd.size()} workers")
            state.losses = [*state.losses, average]
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)
    return model.state_dict(), state.losses


# COMMAND ----------

# MAGIC %md
# MAGIC `run` returns what the function returned in each worker, by rank. The replicas are equal, so the first will
# MAGIC do.

# COMMAND ----------

from sklearn.datasets import load_digits

images = (load_digits().data / 16).astype("float32")
results = spark_elastic.run(train, args=(images, 40), num_proc=2, min_num_proc=1)
weights, losses = results[0]

# COMMAND ----------

# MAGIC %md
# MAGIC ## Digits that nobody wrote
# MAGIC The decoder makes an image of any point of the latent space.

# COMMAND ----------

import matplotlib.pyplot as plt

model = Autoencoder()
model.load_state_dict(weights)
torch.manual_seed(1)
with torch.no_grad():
    drawn = torch.sigmoid(model.decode(torch.randn(20, 8))).reshape(20, 8, 8)

figure, axes = plt.subplots(2, 10, figsize=(8, 1.8))
for axis, image in zip(axes.flat, drawn, strict=True):
    axis.imshow(image, cmap="gray_r")
    axis.axis("off")
plt.show()

# COMMAND ----------

print(f"loss: {losses[0]:.1f} after the first epoch, {losses[-1]:.1f} after the last")
