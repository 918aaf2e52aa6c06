"""A newcomer's program: CSV, Spark's encoders, a model whose width nobody counts, Spark's evaluator, pandas."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, StringIndexer, VectorAssembler

from tests.nightly import by_night

SETTINGS: dict[str, Any] = {"feature_cols": ["features"], "label_cols": ["label"], "batch_size": 64, "epochs": 12}
SERVE = """
import json, sys
import pandas as pd
import spark_elastic
from pyspark.sql import SparkSession

folder, rows, kind = sys.argv[1:]
try:
    spark_elastic.load_module(folder)
except spark_elastic.errors.CheckpointError as error:
    folder = str(error).rpartition("its stage is in ")[2]
print(type(spark_elastic.load_module(folder)).__name__)
made = getattr(spark_elastic, kind).load(folder).predict(pd.read_json(rows))
print(json.dumps([made["prediction"].tolist(), [float(each[1]) for each in made["probability"]]]))
assert SparkSession.getActiveSession() is None
"""


def torch_estimator() -> Any:
    import torch
    from torch import nn

    from spark_elastic import ElasticTorchEstimator

    def make(shapes: Any) -> nn.Module:
        width = shapes[0][1]
        return nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    return ElasticTorchEstimator(
        model=make,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        loss=nn.BCEWithLogitsLoss(),
        num_proc=2,
        verbose=0,
        **SETTINGS,
    )


def keras_estimator() -> Any:
    keras = pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    from spark_elastic import ElasticKerasEstimator

    def make(shapes: Any) -> Any:
        dense, norm = keras.layers.Dense, keras.layers.BatchNormalization()
        return keras.Sequential([norm, dense(16, activation="relu"), dense(1, activation="sigmoid")])

    return ElasticKerasEstimator(
        model=make, optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy", num_proc=2, verbose=0, **SETTINGS
    )


def write_csv(path: Path) -> None:
    chance = random.Random(1)
    lines = ["age,hours,job,city,label"]
    for _ in range(800):
        age, hours = chance.uniform(18, 70), chance.uniform(0, 60)
        job, city = chance.choice(["clerk", "smith", "baker"]), chance.choice(["Rome", "Oslo"])
        lines.append(f"{age:.1f},{hours:.1f},{job},{city},{int(age / 10 + hours / 10 + 3 * (job == 'baker') > 8)}")
    path.write_text("\n".join(lines))


@pytest.mark.parametrize("make", by_night([torch_estimator, keras_estimator], but=[torch_estimator]))
def test_csv_becomes_a_model_that_is_evaluated_saved_and_used_without_spark(
    make: Any, spark: Any, tmp_path: Path
) -> None:
    write_csv(tmp_path / "people.csv")
    people = spark.read.csv(f"{tmp_path}/people.csv", header=True, inferSchema=True)
    train, test = people.randomSplit([0.8, 0.2], seed=1)
    stages = [
        StringIndexer(inputCols=["job", "city"], outputCols=["job_number", "city_number"]),
        OneHotEncoder(inputCols=["job_number", "city_number"], outputCols=["jobs", "cities"]),
        VectorAssembler(inputCols=["age", "hours", "jobs", "cities"], outputCol="features"),
        make(),
    ]
    model = Pipeline(stages=stages).fit(train)
    scored = model.transform(test)
    area = BinaryClassificationEvaluator().evaluate(scored)
    assert area > 0.9
    model.save(path := str(tmp_path / "pipeline"))
    assert BinaryClassificationEvaluator().evaluate(PipelineModel.load(path).transform(test)) == pytest.approx(area)

    rows = scored.select("features", "prediction", "probability").collect()
    (tmp_path / "rows.json").write_text(json.dumps([{"features": row.features.toArray().tolist()} for row in rows]))
    kind = type(model.stages[-1]).__name__
    command = [sys.executable, "-c", SERVE, path, str(tmp_path / "rows.json"), kind]
    there = {**os.environ, "JAVA_HOME": "/nowhere", "SPARK_HOME": ""}
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    name, found = done.stdout.splitlines()[-2:]
    assert name == "Sequential"
    predictions, probabilities = json.loads(found)
    assert predictions == [row.prediction for row in rows]
    assert probabilities == pytest.approx([row.probability[1] for row in rows], abs=1e-5)
