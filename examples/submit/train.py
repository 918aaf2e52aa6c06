"""Handwritten digits, trained as a submitted application; README.md beside this file has the commands.

spark-submit --master "local[2]" examples/submit/train.py --output digits-model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

from spark_elastic import Callback, ElasticTorchEstimator


def main(options: argparse.Namespace) -> None:
    spark = SparkSession.builder.appName("digits").getOrCreate()  # the master and all settings are spark-submit's
    spark.sparkContext.setLogLevel("WARN")
    train, test = table(spark, options.input).randomSplit([0.8, 0.2], seed=1)

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
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=[StopFile(options.stop_file)] if options.stop_file else [],
        num_proc=options.num_proc,
        min_num_proc=options.min_num_proc,
        max_num_proc=options.max_num_proc,
        store=options.store,
        checkpoint_dir=options.checkpoint_dir,
        run_id=options.run_id,
    )
    model = estimator.fit(train)
    model.write().overwrite().save(options.output)

    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(model.transform(test))
    print(f"accuracy on {test.count()} digits that it has not seen: {accuracy:.3f}; saved to {options.output}")
    spark.stop()


def table(spark: SparkSession, path: str | None) -> DataFrame:
    """`features`, an array of 64 numbers, and `label`: from Parquet, or the digits that scikit-learn ships."""
    if path is not None:
        return spark.read.parquet(path)
    digits = load_digits()
    return spark.createDataFrame(pd.DataFrame({"features": (digits.data / 16).tolist(), "label": digits.target}))


def correct(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label).float()


class StopFile(Callback):
    """Ends the training after the epoch in which a file appears: nobody can press Ctrl-C in a submitted job."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_epoch_end(self, run, logs) -> None:
        if run.rank == 0 and Path(self.path).exists():
            run.stop(f"{self.path} is there")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="Parquet with the columns features and label; default: scikit-learn's digits")
    parser.add_argument("--output", required=True, help="where to save the model, on a file system of Spark's")
    parser.add_argument("--store", help="folder or URI that driver and executors share; needed on several machines")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--num-proc", type=int, help="workers to start with; default: the task slots of the cluster")
    parser.add_argument("--min-num-proc", type=int, help="fewest to go on with")
    parser.add_argument("--max-num-proc", type=int, help="most to grow to")
    parser.add_argument("--checkpoint-dir", help="shared folder or URI; with --run-id the job can be submitted again")
    parser.add_argument("--run-id", help="name of this training; with it, a job whose driver died goes on")
    parser.add_argument("--stop-file", help="end after the epoch in which this file appears")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
