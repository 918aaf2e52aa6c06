"""A worker dies in the middle of the `fit` of a Keras model, and nobody can tell from what was learnt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic import ElasticKerasEstimator  # noqa: E402
from tests.integration.clusters import local_cluster  # noqa: E402
from tests.integration.processes import wait_for_file  # noqa: E402
from tests.unit.ml.keras.estimators import HereEstimator  # noqa: E402

EPOCHS = 40


def settings(**changes: Any) -> dict[str, Any]:
    layers = keras.layers
    first, last = (keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
    net = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(16, activation="tanh", kernel_initializer=first),
            layers.Dense(2, kernel_initializer=last),
        ]
    )
    net.compile(
        keras.optimizers.SGD(0.2, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return {
        "model": net,
        "feature_cols": ["a", "b", "c"],
        "label_cols": ["label"],
        "batch_size": 64,
        "epochs": EPOCHS,
        "validation": 0.2,
        "verbose": 0,
        **changes,
    }


@pytest.fixture(scope="module")
def cluster() -> Any:
    with local_cluster(workers=2, cores=1, memory_mb=1024) as made:
        made.sc.setLogLevel("OFF")
        yield made


def test_the_history_is_that_of_a_fit_without_the_kill(cluster: Any, tmp_path: Path) -> None:
    random = [(F.rand(seed) * 2 - 1).alias(name) for seed, name in enumerate("abc")]
    df = cluster.spark.range(0, 3000, 1, 2).select(*random)
    df = df.withColumn("label", (F.col("a") * F.col("b") > F.col("c")).cast("int"))
    df.write.parquet(str(tmp_path / "rows"))
    rows = cluster.spark.read.parquet(str(tmp_path / "rows"))
    estimator = ElasticKerasEstimator(
        **settings(
            num_proc=2,
            min_num_proc=1,
            store=str(tmp_path),
            checkpoint_dir=str(tmp_path / "runs"),
            run_id="a",
            keep_dataset=True,
        )
    )

    def kill() -> None:
        wait_for_file(tmp_path, "checkpoint.json", 200, "the first checkpoint")
        cluster.kill_executor(next(iter(cluster.executors())))

    killer = threading.Thread(target=kill)
    killer.start()
    model = estimator.fit(rows)
    killer.join()
    worlds = [event["after"] for event in model.events if event["kind"] in ("started", "lost")]
    assert worlds[:2] == [2, 1], "two workers, and then the survivor"
    assert [event for event in model.events if event["kind"] == "lost"]

    undisturbed = HereEstimator(**settings(store=str(tmp_path))).fit(rows)
    assert len(model.history) == EPOCHS
    for name in ("steps", "rows"):
        assert model.history[name] == undisturbed.history[name]
    for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
        assert np.allclose(model.history[name], undisturbed.history[name], atol=5e-3)

    # A fit whose driver has died, and that is called again: it goes on where the last checkpoint stands.
    again = HereEstimator(**settings(store=str(tmp_path), checkpoint_dir=str(tmp_path / "runs"), run_id="a"))
    went_on = again.setEpochs(EPOCHS + 1).fit(rows)
    assert again.training.resume_from is not None
    assert went_on.history[:EPOCHS] == tuple(model.history)
    assert len(went_on.history) == EPOCHS + 1
    scored = went_on.transform(rows)
    assert scored.where("prediction = label").count() / scored.count() > 0.9
