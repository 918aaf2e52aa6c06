"""Several inputs in Keras, with Horovod."""

import tensorflow as tf
from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(
    (F.rand(seed=1) * 20).cast("int").alias("shop"), F.rand(seed=2).alias("price"), F.rand(seed=3).alias("weight")
)
rows = rows.withColumn("sold", (F.col("shop") % 2 + F.col("price") > 1).cast("int"))

shop = tf.keras.Input((1,), dtype="int32", name="shop")
price = tf.keras.Input((1,), name="price")
weight = tf.keras.Input((1,), name="weight")
body = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(20, 4)(shop))
body = tf.keras.layers.concatenate([body, price, weight])
body = tf.keras.layers.Dense(16, activation="relu")(body)
net = tf.keras.Model([shop, price, weight], tf.keras.layers.Dense(1, activation="sigmoid")(body))

estimator = KerasEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=tf.keras.optimizers.Adam(0.02),
    loss="binary_crossentropy",
    metrics=["accuracy", tf.keras.metrics.AUC(name="auc")],
    feature_cols=["shop", "price", "weight"],
    label_cols=["sold"],
    batch_size=32,
    epochs=3,
)
history = estimator.fit(rows).getHistory()
print(history["auc"])
assert history["auc"][-1] > history["auc"][0]
