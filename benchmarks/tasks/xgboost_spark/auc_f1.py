"""AUC of held-out rows after each round and F1 at the end, with xgboost.spark."""

from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") + F.col("y") > 1).cast("int"))
rows = rows.withColumn("held_out", F.rand(seed=3) < 0.2).cache()

classifier = SparkXGBClassifier(
    features_col=["x", "y"], validation_indicator_col="held_out", eval_metric="auc", num_workers=2
)
model = classifier.fit(rows)
auc = model.training_summary.validation_objective_history["auc"]
evaluator = MulticlassClassificationEvaluator(metricName="fMeasureByLabel", metricLabel=1.0)
print(auc, evaluator.evaluate(model.transform(rows.where("held_out"))))
assert auc[-1] > 0.95
