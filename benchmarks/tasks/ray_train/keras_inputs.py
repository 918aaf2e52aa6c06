"""Several inputs in Keras, with Ray Train."""

import ray.train
import tensorflow as tf
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.tensorflow import TensorflowTrainer

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select(
    (F.rand(seed=1) * 20).cast("int").alias("shop"), F.rand(seed=2).alias("price"), F.rand(seed=3).alias("weight")
)
rows = rows.withColumn("sold", (F.col("shop") % 2 + F.col("price") > 1).cast("int"))
rows.write.mode("overwrite").parquet("rows.parquet")


def build_net():
    shop = tf.keras.Input((1,), dtype="int64", name="shop")
    numbers = tf.keras.Input((2,), name="numbers")
    body = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(20, 4)(shop))
    body = tf.keras.layers.concatenate([body, numbers])
    body = tf.keras.layers.Dense(16, activation="relu")(body)
    return tf.keras.Model([shop, numbers], tf.keras.layers.Dense(1, activation="sigmoid")(body))


def inputs(columns, sold):
    shop = tf.expand_dims(tf.cast(columns["shop"], tf.int64), 1)
    return (shop, tf.stack([columns["price"], columns["weight"]], axis=1)), tf.expand_dims(sold, 1)


def train_loop():
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        net = build_net()
        net.compile(
            optimizer=tf.keras.optimizers.Adam(0.02),
            loss="binary_crossentropy",
            metrics=["accuracy", tf.keras.metrics.AUC(name="auc")],
        )
    train = ray.train.get_dataset_shard("train").to_tf(
        feature_columns=["shop", "price", "weight"],
        label_columns="sold",
        batch_size=32,
        local_shuffle_buffer_size=1_000,
    )
    return net.fit(train.map(inputs), epochs=3).history


trainer = TensorflowTrainer(
    train_loop,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    datasets={"train": ray.data.read_parquet("rows.parquet")},
)
history = trainer.fit().return_value
print(history["auc"])
assert history["auc"][-1] > history["auc"][0]
