"""Texts of variable length, with xgboost.spark: trees of word counts, without padding."""

from pyspark.ml import Pipeline
from pyspark.ml.feature import CountVectorizer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

spark = SparkSession.builder.master("local[3]").getOrCreate()
texts = spark.createDataFrame(
    [("good film", 1), ("a bad film", 0), ("good", 1), ("bad bad", 0)] * 50, ["text", "label"]
)
rows = texts.withColumn("tokens", F.split("text", " "))

stages = [CountVectorizer(inputCol="tokens", outputCol="features"), SparkXGBClassifier(num_workers=2)]
scored = Pipeline(stages=stages).fit(rows).transform(rows)
assert scored.where("label != prediction").count() == 0
