"""Handwritten digits with ElasticTorchEstimator, on this machine: fit, score, save, load.

    python examples/estimator.py

The same code runs on a cluster; only the session's master is another one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd
import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

from spark_elastic import ElasticTorchEstimator, ElasticTorchModel
from spark_elastic.ml.callbacks import EarlyStopping


def correct(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """1 for each row whose largest output is its label; the mean over all rows is the accuracy."""
    return (output.argmax(dim=1) == label).float()


def main() -> None:
    spark = SparkSession.builder.master("local[3]").appName("digits").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    digits = load_digits()
    df = spark.createDataFrame(pd.DataFrame({"features": (digits.data / 16).tolist(), "label": digits.target}))
    train, test = df.randomSplit([0.8, 0.2], seed=1)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": correct},
        feature_cols=["features"],
        label_cols=["label"],
        validation=0.1,
        batch_size=64,
        epochs=30,
        callbacks=[EarlyStopping("val_loss", patience=5, restore_best=True)],
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
        again = ElasticTorchModel.load(path).transform(test)
        assert [row.prediction for row in again.collect()] == [row.prediction for row in scored.collect()]
    spark.stop()


if __name__ == "__main__":
    main()
