"""Callbacks in the workers, with xgboost.spark."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from xgboost.callback import EarlyStopping, TrainingCallback
from xgboost.spark import SparkXGBRegressor


class HalveOnPlateau(TrainingCallback):
    def __init__(self, least_gain=0.01):
        self.least_gain = least_gain
        self.best = float("inf")
        self.rate = 0.3

    def after_iteration(self, model, epoch, evals_log):
        loss = evals_log["training"]["rmse"][-1]
        if loss > self.best - self.least_gain:
            self.rate /= 2
            model.set_param("learning_rate", self.rate)
            print(f"round {epoch}: learning rate {self.rate}")
        self.best = min(self.best, loss)
        return False


class StopWhenGood(TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        return evals_log["training"]["rmse"][-1] < 0.01


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(F.randn(seed=1).alias("x"))
rows = rows.withColumn("y", 2 * F.col("x") + F.rand(seed=2))

regressor = SparkXGBRegressor(
    features_col=["x"],
    label_col="y",
    validation_indicator_col="held_out",
    callbacks=[HalveOnPlateau(), EarlyStopping(rounds=4), StopWhenGood()],
    n_estimators=50,
    num_workers=2,
)
summary = regressor.fit(rows.withColumn("held_out", F.rand(seed=3) < 0.1)).training_summary
print(summary.validation_objective_history["rmse"])
assert len(summary.train_objective_history["rmse"]) < 50
