# Databricks notebook source
# MAGIC %md
# MAGIC # Pipeline and CrossValidator
# MAGIC
# MAGIC The estimators are ordinary stages of Spark ML: they stand in a `Pipeline` behind Spark's own transformers,
# MAGIC and `CrossValidator` chooses their settings. The task: which of three growers does a wine come from, by its
# MAGIC chemistry?

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

from sklearn.datasets import load_wine

wines = load_wine(as_frame=True).frame.rename(columns={"target": "label"})
wines.columns = [name.replace("/", "_") for name in wines.columns]
df = spark.createDataFrame(wines)
train, test = df.randomSplit([0.7, 0.3], seed=2)
train, test = train.cache(), test.cache()
wines.groupby("label")[["alcohol", "malic_acid", "color_intensity", "proline"]].mean().round(1)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A pipeline
# MAGIC Spark's `VectorAssembler` and `StandardScaler` prepare the columns; the network takes their vector.

# COMMAND ----------

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import StandardScaler, VectorAssembler
from torch import nn

from spark_elastic import ElasticTorchEstimator, ElasticTorchModel

torch.manual_seed(0)
assembler = VectorAssembler(inputCols=[name for name in df.columns if name != "label"], outputCol="raw")
scaler = StandardScaler(inputCol="raw", outputCol="features", withMean=True)
network = ElasticTorchEstimator(
    model=nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3)),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    loss=nn.CrossEntropyLoss(),
    feature_cols=["features"],
    label_cols=["label"],
    batch_size=16,
    num_proc=2,
    min_num_proc=1,
    verbose=0,
)
pipeline = Pipeline(stages=[assembler, scaler, network])

# COMMAND ----------

# MAGIC %md
# MAGIC ## The choice
# MAGIC How long to train? Every setting of the estimator is a Param that a grid may vary. Two candidates on two
# MAGIC folds are four elastic trainings, and a fifth of the winner on all rows.

# COMMAND ----------

from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
grid = ParamGridBuilder().addGrid(network.epochs, [2, 20]).build()
search = CrossValidator(
    estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1, parallelism=1
)
best = search.fit(train)

for settings, accuracy in zip(grid, best.avgMetrics, strict=True):
    print(f"{settings[network.epochs]:2} epochs: accuracy {accuracy:.3f}")

# COMMAND ----------

# MAGIC %md
# MAGIC `best` is a model of Spark ML. It takes the raw columns, since the scaler stands in the pipeline.

# COMMAND ----------

scored = best.transform(test)
print(f"accuracy {evaluator.evaluate(scored):.3f} on {test.count()} wines that it has not seen")
scored.groupBy("label").pivot("prediction").count().orderBy("label").na.fill(0).toPandas()

# COMMAND ----------

assert isinstance(best.bestModel, PipelineModel)
trained = best.bestModel.stages[-1]
assert isinstance(trained, ElasticTorchModel)
print(f"the winner was trained for {len(trained.history)} epochs; its last loss is {trained.history[-1]['loss']:.3f}")
