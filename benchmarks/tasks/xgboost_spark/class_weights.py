"""Class weights, with xgboost.spark."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") * F.col("y") > 1).cast("int"))

counts = {row["label"]: row["count"] for row in rows.groupBy("label").count().collect()}
classifier = SparkXGBClassifier(features_col=["x", "y"], scale_pos_weight=counts[0] / counts[1], num_workers=2)
recall = classifier.fit(rows).transform(rows.where("label = 1")).agg(F.avg("prediction")).first()
assert recall[0] > 0.5
