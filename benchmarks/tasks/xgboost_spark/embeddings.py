"""Ids and numbers, with xgboost.spark: trees without embeddings, the ids as categories."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBRegressor

USERS, ITEMS = 100, 50

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(
    (F.rand(seed=1) * USERS).cast("int").alias("user"),
    (F.rand(seed=2) * ITEMS).cast("int").alias("item"),
    F.rand(seed=3).alias("price"),
    F.rand(seed=4).alias("age"),
)
rows = rows.withColumn("rating", F.col("item") % 5 + F.col("price"))

regressor = SparkXGBRegressor(
    features_col=["user", "item", "price", "age"],
    feature_types=["c", "c", "float", "float"],
    label_col="rating",
    num_workers=2,
)
model = regressor.fit(rows)
model.transform(rows).select("user", "item", "rating", "prediction").show(3)
loss = model.training_summary.train_objective_history["rmse"]
assert loss[-1] < loss[0]
