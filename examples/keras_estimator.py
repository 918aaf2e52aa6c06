"""Handwritten digits with ElasticKerasEstimator, on this machine: fit, score, save, load.

    python examples/keras_estimator.py

The same code runs on a cluster; only the session's master is another one. TensorFlow is in the extra of that name:
`pip install "spark-elastic[tensorflow]"`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import pandas as pd
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from spark_elastic import ElasticKerasEstimator, ElasticKerasModel
from spark_elastic.ml.callbacks import EarlyStopping


def main() -> None:
    spark = SparkSession.builder.master("local[3]").appName("digits").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    digits = load_digits()
    df = spark.createDataFrame(pd.DataFrame({"features": (digits.data / 16).tolist(), "label": digits.target}))
    train, test = df.randomSplit([0.8, 0.2], seed=1)

    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    net.compile(optimizer=keras.optimizers.Adam(3e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    estimator = ElasticKerasEstimator(
        model=net,
        feature_cols=["features"],
        label_cols=["label"],
        validation=0.1,
        batch_size=64,
        epochs=30,
        callbacks=[keras.callbacks.ReduceLROnPlateau(patience=3), EarlyStopping(patience=5, restore_best=True)],
        num_proc=2,
        min_num_proc=1,
    )
    model = estimator.fit(train)
    for row in model.history[-3:]:
        print({name: round(value, 4) for name, value in row.items()})

    scored = model.transform(test)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    print(f"accuracy on {test.count()} digits that it has not seen: {accuracy:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "digits"))
        model.save(path)
        again = ElasticKerasModel.load(path).transform(test)
        assert [row.prediction for row in again.collect()] == [row.prediction for row in scored.collect()]
    spark.stop()


if __name__ == "__main__":
    main()
