"""Tuning with Optuna, with xgboost.spark."""

import optuna
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.spark import SparkXGBClassifier

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") * F.col("y") > 0).cast("int")).cache()
rows = rows.withColumn("held_out", F.rand(seed=3) < 0.2)


def objective(trial):
    classifier = SparkXGBClassifier(
        features_col=["x", "y"],
        validation_indicator_col="held_out",
        max_depth=trial.suggest_int("max_depth", 2, 8, log=True),
        learning_rate=trial.suggest_float("learning_rate", 1e-2, 1, log=True),
        subsample=trial.suggest_categorical("subsample", [0.5, 1.0]),
        num_workers=1,
    )
    return classifier.fit(rows).training_summary.validation_objective_history["logloss"][-1]


study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=3)
print(study.best_params, study.best_value)
assert len(study.trials) == 3
