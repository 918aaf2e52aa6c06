# Databricks notebook source
# MAGIC %md
# MAGIC # Coming from Horovod
# MAGIC
# MAGIC A script or a function that was written for Horovod needs one other import line. This notebook changes it,
# MAGIC shows the difference and runs the result both ways: as a function in this session, and as a script from the
# MAGIC command line.

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The script
# MAGIC As Horovod's users write them: `init`, a share of the rows by rank, a wrapped optimizer, broadcasts at the
# MAGIC start. It predicts how a diabetes patient's disease progresses within a year.

# COMMAND ----------

written_for_horovod = """\
import argparse

import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


def main(epochs, lr):
    hvd.init()
    torch.manual_seed(0)
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x / x.std(), dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    rows = TensorDataset(x[:352], y[:352, None])
    sampler = DistributedSampler(rows, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(rows, batch_size=16, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        average = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {average:.3f} on {hvd.size()} workers")
    with torch.no_grad():
        error = torch.nn.functional.mse_loss(model(x[352:]), y[352:, None]).item()
    return 1 - error / y[352:].var().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.003)
    options = parser.parse_args()
    explained = main(options.epochs, options.lr)
    if hvd.rank() == 0:
        print(f"share of the variance explained: {explained:.2f}")
"""

# COMMAND ----------

# MAGIC %md
# MAGIC ## The difference

# COMMAND ----------

import difflib

migrated = written_for_horovod.replace("import horovod.torch as hvd", "import spark_elastic.torch as hvd")
lines = difflib.unified_diff(
    written_for_horovod.splitlines(), migrated.splitlines(), "horovod", "spark_elastic", lineterm="", n=1
)
print("\n".join(lines))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Run as a script
# MAGIC `spark-elastic -np 2 train.py` is what `horovodrun -np 2 python train.py` was. With `--master` it runs on a
# MAGIC cluster; here, `--launcher local` takes plain processes of this machine, since the notebook holds a Spark
# MAGIC session already.

# COMMAND ----------

import subprocess
from pathlib import Path

Path("train.py").write_text(migrated)
command = [sys.executable, "-m", "spark_elastic", "--launcher", "local", "-np", "2", "train.py", "--epochs", "20"]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout)
assert done.returncode == 0, done.stderr

# COMMAND ----------

# MAGIC %md
# MAGIC ## Run as a function
# MAGIC `horovod.spark.run(main, ...)` and `HorovodRunner(np=2).run(main, ...)` become `spark_elastic.run(main,
# MAGIC ...)`, in this notebook's session and on all of its executors.

# COMMAND ----------

from typing import Any

import spark_elastic

program: dict[str, Any] = {"__name__": "train"}
exec(migrated, program)
explained = spark_elastic.run(program["main"], kwargs={"epochs": 20, "lr": 0.003}, num_proc=2)
print(f"share of the variance explained, by each worker: {[round(each, 2) for each in explained]}")

# COMMAND ----------

# MAGIC %md
# MAGIC This script is not elastic yet: if a worker is lost, the job fails, as it would with Horovod. An elastic
# MAGIC loop, with `hvd.elastic.run` and a `TorchState` as in Horovod, is in the notebook `04_custom_loop`.
