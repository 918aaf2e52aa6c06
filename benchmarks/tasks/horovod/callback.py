"""Callbacks in the workers, with Horovod, whose Keras estimator has them; that of PyTorch ignores them."""

import tensorflow as tf
from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F


class HalveOnPlateau(tf.keras.callbacks.Callback):
    def __init__(self, least_gain=0.01):
        super().__init__()
        self.least_gain = least_gain
        self.best = float("inf")

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] > self.best - self.least_gain:
            rate = self.model.optimizer.learning_rate
            rate.assign(rate / 2)
            print(f"epoch {epoch}: lr {rate.numpy()}")
        self.best = min(self.best, logs["loss"])
        logs["lr"] = float(self.model.optimizer.learning_rate.numpy())


class StopWhenGood(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < 0.01:
            self.model.stop_training = True


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(F.randn(seed=1).alias("x"))
rows = rows.withColumn("y", 2 * F.col("x") + F.rand(seed=2))

estimator = KerasEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)]),
    optimizer=tf.keras.optimizers.SGD(0.1),
    loss="mse",
    feature_cols=["x"],
    label_cols=["y"],
    validation=0.1,
    callbacks=[HalveOnPlateau(), tf.keras.callbacks.EarlyStopping("val_loss", patience=4), StopWhenGood()],
    batch_size=50,
    epochs=5,
)
history = estimator.fit(rows).getHistory()
print(history["lr"])
assert history["lr"][-1] < history["lr"][0]
