"""Predictions of a stream, with xgboost.spark."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(500).select("id", (F.randn(seed=1)).alias("x"), (F.randn(seed=2)).alias("y"))
labelled = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int"))
model = SparkXGBClassifier(features_col=["x", "y"], num_workers=2).fit(labelled)

rows.write.mode("overwrite").parquet("arriving")
arriving = spark.readStream.schema(rows.schema).parquet("arriving")
query = (
    model.transform(arriving)
    .writeStream.format("memory")
    .queryName("scored")
    .outputMode("append")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.table("scored").show(3)
assert spark.table("scored").where("prediction is not null").count() == 500
