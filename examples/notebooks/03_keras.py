# Databricks notebook source
# MAGIC %md
# MAGIC # Keras on Spark
# MAGIC
# MAGIC `ElasticKerasEstimator` takes a compiled Keras 3 model, or a model and the arguments of `compile`. Keras's
# MAGIC own callbacks work beside those of this package. The task: is a tumour malignant or benign, by 30
# MAGIC measurements of its cells?

# COMMAND ----------

import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers use the Python of this notebook
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow: warnings only
spark = SparkSession.builder.master("local[3]").getOrCreate()  # on Databricks: the session that is there
spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

from sklearn.datasets import load_breast_cancer

tumours = load_breast_cancer(as_frame=True)
measurements = list(tumours.data.columns)
df = spark.createDataFrame(tumours.frame.rename(columns={"target": "benign"}))
train, test = df.randomSplit([0.8, 0.2], seed=3)
tumours.frame[["mean radius", "mean texture", "mean area", "target"]].groupby("target").mean().round(1)

# COMMAND ----------

# MAGIC %md
# MAGIC The measurements differ by orders of magnitude. A `Normalization` layer that has seen the training rows
# MAGIC brings them to one scale, and it travels with the model: what is saved later needs no scaler beside it.

# COMMAND ----------

import keras

from spark_elastic import ElasticKerasEstimator

keras.utils.set_random_seed(0)
scale = keras.layers.Normalization()
scale.adapt(train.select(*[f"`{name}`" for name in measurements]).toPandas().to_numpy("float32"))
net = keras.Sequential(
    [
        keras.Input((len(measurements),)),
        scale,
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
estimator = ElasticKerasEstimator(
    model=net,
    optimizer=keras.optimizers.Adam(3e-3),
    loss="binary_crossentropy",
    metrics=["accuracy", keras.metrics.AUC(name="auc")],
    feature_cols=measurements,
    label_cols=["benign"],
    validation=0.2,
    batch_size=32,
    epochs=20,
    callbacks=[
        keras.callbacks.ReduceLROnPlateau(patience=3),
        keras.callbacks.EarlyStopping(patience=6, restore_best_weights=True),
    ],
    num_proc=2,
    min_num_proc=1,
    probability_col="probability",
)
model = estimator.fit(train)

# COMMAND ----------

model.plot()

# COMMAND ----------

# MAGIC %md
# MAGIC ## How good is it?
# MAGIC `probability_col` has a vector with both classes' probabilities, as Spark's evaluators want it.

# COMMAND ----------

from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import functions as F

scored = model.transform(test).cache()
auc = BinaryClassificationEvaluator(labelCol="benign", rawPredictionCol="probability").evaluate(scored)
right = scored.agg(F.avg((F.col("prediction") == F.col("benign")).cast("double"))).collect()[0][0]
print(f"area under the ROC curve {auc:.3f}, accuracy {right:.1%}, on {scored.count()} tumours it has not seen")

# COMMAND ----------

scored.groupBy("benign", "prediction").count().orderBy("benign", "prediction").toPandas()

# COMMAND ----------

# MAGIC %md
# MAGIC `model.keras_model` is the trained Keras model itself, for all that Keras can do with one.

# COMMAND ----------

print(f"{model.keras_model.count_params():,} parameters in {len(model.keras_model.layers)} layers")
