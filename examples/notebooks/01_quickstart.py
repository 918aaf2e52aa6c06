# Databricks notebook source
# MAGIC %md
# MAGIC # Quickstart: from a DataFrame to a trained network
# MAGIC
# MAGIC `ElasticTorchEstimator` is a Spark ML estimator. `fit` takes a DataFrame, trains a PyTorch module in Spark
# MAGIC tasks, one worker each, and returns a Spark ML model. Workers may come and go meanwhile; here, on one
# MAGIC machine, two of them learn to read handwritten digits.

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The data
# MAGIC 1,797 digits of 8 × 8 pixels, which scikit-learn ships. One array column holds the pixels, one integer
# MAGIC column the label.

# COMMAND ----------

import matplotlib.pyplot as plt
import pandas as pd
from sklearn.datasets import load_digits

digits = load_digits()
df = spark.createDataFrame(pd.DataFrame({"pixels": (digits.data / 16).tolist(), "label": digits.target}))
train, test = df.randomSplit([0.8, 0.2], seed=1)

figure, axes = plt.subplots(1, 10, figsize=(8, 1))
for axis, image, label in zip(axes, digits.images, digits.target, strict=False):
    axis.imshow(image, cmap="gray_r")
    axis.set_title(label)
    axis.axis("off")
plt.show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The fit
# MAGIC `batch_size` is that of all workers together: how many there are does not change what is learnt, only how
# MAGIC fast. `min_num_proc=1` says that one worker is enough to go on with, should the other be lost.

# COMMAND ----------

import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.ml.callbacks import EarlyStopping


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label).float()  # one value for each row


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
estimator = ElasticTorchEstimator(
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
    loss=nn.CrossEntropyLoss(),
    metrics={"accuracy": accuracy},
    feature_cols=["pixels"],
    label_cols=["label"],
    validation=0.1,
    batch_size=64,
    epochs=15,
    callbacks=[EarlyStopping("val_loss", patience=3, restore_best=True)],
    num_proc=2,
    min_num_proc=1,
)
model = estimator.fit(train)

# COMMAND ----------

# MAGIC %md
# MAGIC `model.history` has a row for each epoch, and `model.plot()` draws it.

# COMMAND ----------

pd.DataFrame(model.history)[["epoch", "loss", "accuracy", "val_loss", "val_accuracy"]].tail(3).round(3)

# COMMAND ----------

model.plot()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Predictions
# MAGIC The model is a `Transformer`: it adds the network's `output` and a `prediction` to any DataFrame that has
# MAGIC the columns it was trained on. Here those are the digits that were kept aside.

# COMMAND ----------

from pyspark.ml.evaluation import MulticlassClassificationEvaluator

scored = model.transform(test)
right = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
print(f"{right:.1%} of {test.count()} unseen digits are read correctly")

# COMMAND ----------

mistaken = scored.where("label != prediction").select("label", "prediction").toPandas()
mistaken.value_counts().rename("times").reset_index().head()
