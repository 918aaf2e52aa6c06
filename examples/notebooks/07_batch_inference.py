# Databricks notebook source
# MAGIC %md
# MAGIC # Batch inference with a saved model
# MAGIC
# MAGIC One job trains a model and saves it. Later another job, perhaps on another cluster, loads it and scores a
# MAGIC large table. The network travels to each executor once and is given whole batches of rows through Arrow.

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The job that trains
# MAGIC How many minutes does a taxi take? Longer in the rush hours, longer still when it rains, and never quite as
# MAGIC predicted.

# COMMAND ----------

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def rides(count: int, seed: int) -> DataFrame:
    table = spark.range(count).select(
        "id",
        (0.5 - 4 * F.log(1 - F.rand(seed=seed))).alias("km"),
        (24 * F.rand(seed=seed + 1)).alias("hour"),
        (F.rand(seed=seed + 2) < 0.2).cast("double").alias("rain"),
    )
    hour = F.col("hour")
    rush = F.exp(-((hour - 8.5) ** 2) / 3) + F.exp(-((hour - 17.5) ** 2) / 5)
    minutes = 3 + F.col("km") * (2 + 2 * rush) * (1 + 0.3 * F.col("rain"))
    return table.withColumn("minutes", minutes * F.exp(0.1 * F.randn(seed=seed + 3)))


rides(100_000, seed=1).limit(4).toPandas().round(2)

# COMMAND ----------

import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator

torch.manual_seed(0)
net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
estimator = ElasticTorchEstimator(
    model=net,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    loss=nn.SmoothL1Loss(),
    feature_cols=["km", "hour", "rain"],
    label_cols=["minutes"],
    validation=0.1,
    batch_size=256,
    epochs=8,
    num_proc=2,
    min_num_proc=1,
)
model = estimator.fit(rides(100_000, seed=1))

# COMMAND ----------

# MAGIC %md
# MAGIC `save` writes to any file system that Spark knows: DBFS, a Unity Catalog volume, S3, HDFS. This module
# MAGIC consists of PyTorch's own layers, so loading it runs no code from the files; a class of your own asks for
# MAGIC `load(path, trusted=True)`.

# COMMAND ----------

path = "models/minutes"
model.write().overwrite().save(path)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The job that scores
# MAGIC A million rides of which it has seen none. `transform` is lazy, as everything in Spark: the work is done
# MAGIC where the result is written.

# COMMAND ----------

from spark_elastic import ElasticTorchModel

loaded = ElasticTorchModel.load(path)
loaded.set(loaded.output_cols, [])  # the prediction alone, without the network's raw output beside it
loaded.transform(rides(1_000_000, seed=1000)).write.mode("overwrite").parquet("scored")

# COMMAND ----------

from pyspark.ml.evaluation import RegressionEvaluator

scored = spark.read.parquet("scored")
evaluator = RegressionEvaluator(labelCol="minutes")
r2, off = (evaluator.setMetricName(name).evaluate(scored) for name in ("r2", "mae"))
print(f"{scored.count():,} rides scored: R² {r2:.3f}, {off:.2f} minutes off on average")

# COMMAND ----------

# MAGIC %md
# MAGIC What it has learnt of the rush hours: minutes per kilometre over the day, as it was and as the model has
# MAGIC it.

# COMMAND ----------

by_hour = (
    scored.groupBy(F.floor("hour").alias("hour"), (F.col("rain") == 1).alias("rain"))
    .agg((F.sum("minutes") / F.sum("km")).alias("was"), (F.sum("prediction") / F.sum("km")).alias("predicted"))
    .orderBy("hour")
    .toPandas()
)

# COMMAND ----------

import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for rain, part in by_hour.groupby("rain"):
    weather, color = ("rain", "tab:blue") if rain else ("dry", "tab:orange")
    axis.plot(part["hour"], part["was"], "o", color=color, label=f"{weather}, as it was")
    axis.plot(part["hour"], part["predicted"], "-", color=color, label=f"{weather}, predicted")
axis.set(xlabel="hour of the day", ylabel="minutes per km")
figure.legend(loc="outside upper center", ncols=4, fontsize="small")
plt.show()
