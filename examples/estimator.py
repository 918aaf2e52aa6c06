"""Digits in a Spark ML Pipeline: assemble the pixels, train a small network elastically, score the rest.

    python examples/estimator.py [--master local[3]]

Two workers train on three quarters of scikit-learn's 1,797 digits; a tenth of these is set aside to watch the training.
The trained pipeline is saved, loaded again and used on the other rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)  # to run it from a checkout; executors of this machine look there too
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

PIXELS = [f"p{number}" for number in range(64)]


def main() -> float:
    import torch
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits
    from torch import nn

    from spark_elastic import ElasticTorchEstimator
    from spark_elastic.ml.callbacks import EarlyStopping

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--master", default="local[3]")
    spark = SparkSession.builder.master(arguments.parse_args().master).appName("digits").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    pixels, labels = load_digits(return_X_y=True)
    rows = [[*(row / 16).tolist(), int(label)] for row, label in zip(pixels, labels, strict=True)]
    digits = spark.createDataFrame(rows, [*PIXELS, "label"])
    train, test = digits.randomSplit([0.75, 0.25], seed=1)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": lambda output, label: (output.argmax(1) == label).float().mean()},
        feature_cols=["pixels"],
        label_cols=["label"],
        batch_size=64,
        epochs=30,
        validation=0.1,
        callbacks=[EarlyStopping("val_loss", patience=5, restore_best=True)],
        num_proc=2,
        min_num_proc=1,
    )
    trained = Pipeline(stages=[VectorAssembler(inputCols=PIXELS, outputCol="pixels"), estimator]).fit(train)

    model = trained.stages[-1]
    print(f"{len(model.history)} epochs, the best with val_loss {min(model.history['val_loss']):.3f}")
    with tempfile.TemporaryDirectory() as folder:
        trained.write().overwrite().save(f"{folder}/digits")
        loaded = PipelineModel.load(f"{folder}/digits")
        scored = loaded.transform(test)
        scored.select("label", "prediction", "output").show(5)
        accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    print(f"accuracy on {test.count()} rows that it has not seen: {accuracy:.1%}")
    spark.stop()
    return float(accuracy)


if __name__ == "__main__":
    sys.exit(0 if main() > 0.9 else 1)
