"""Go on from a fitted model, with xgboost.spark: it has no layers of which one could be trained alone."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBRegressor, SparkXGBRegressorModel

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select((F.col("id") % 2 + 1).alias("month"), F.randn(seed=1).alias("x"))
rows = rows.withColumn("y", 2 * F.col("x") + F.col("month"))


def fitted(booster, month):
    regressor = SparkXGBRegressor(features_col=["x"], label_col="y", n_estimators=5, xgb_model=booster)
    return regressor.fit(rows.where(F.col("month") == month))


january = fitted(None, 1)
january.write().overwrite().save("january")

february = fitted(SparkXGBRegressorModel.load("january").get_booster(), 2)  # perhaps a month later
assert february.get_booster().num_boosted_rounds() == 10
