"""A CrossValidator with Spark's evaluators, with xgboost.spark."""

from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(600).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int")).cache()

classifier = SparkXGBClassifier(features_col=["x", "y"], num_workers=1)
validator = CrossValidator(
    estimator=classifier,
    estimatorParamMaps=ParamGridBuilder().addGrid(classifier.n_estimators, [10, 30]).build(),
    evaluator=BinaryClassificationEvaluator(),
    numFolds=2,
    parallelism=2,
)
scored = validator.fit(rows).transform(rows)
print(MulticlassClassificationEvaluator(metricName="f1").evaluate(scored))
print(BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored))
assert BinaryClassificationEvaluator(metricName="areaUnderPR").evaluate(scored) > 0.95
