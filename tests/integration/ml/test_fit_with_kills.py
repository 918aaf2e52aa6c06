"""An executor dies in the middle of `fit`, and nobody can tell from what was learnt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from spark_elastic import ElasticTorchEstimator
from tests.integration.clusters import local_cluster
from tests.integration.processes import wait_for_file
from tests.unit.ml.torch.estimators import HereEstimator

EPOCHS = 40


def correct(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).float().mean()


def settings(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    return {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9),
        "loss": nn.CrossEntropyLoss(),
        "metrics": {"correct": correct},
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


def rows_of(cluster: Any, folder: Path) -> Any:
    random = [(F.rand(seed) * 2 - 1).alias(name) for seed, name in enumerate("abc")]
    df = cluster.spark.range(0, 3000, 1, 2).select(*random)
    df = df.withColumn("label", (F.col("a") * F.col("b") > F.col("c")).cast("int"))
    df.write.parquet(str(folder / "rows"))
    return cluster.spark.read.parquet(str(folder / "rows"))


def fit_with_a_kill(cluster: Any, folder: Path, rows: Any, **changes: Any) -> Any:
    """Fit with two workers, one of which is killed with its executor after the first checkpoint."""
    estimator = ElasticTorchEstimator(
        **settings(
            num_proc=2,
            min_num_proc=1,
            store=str(folder),
            checkpoint_dir=str(folder / "runs"),
            run_id="a",
            keep_dataset=True,
            **changes,
        )
    )

    def kill() -> None:
        wait_for_file(folder, "checkpoint.json", 200, "the first checkpoint")
        cluster.kill_executor(next(iter(cluster.executors())))

    killer = threading.Thread(target=kill)
    killer.start()
    model = estimator.fit(rows)
    killer.join()
    return model


def test_the_history_is_that_of_a_fit_without_the_kill(cluster: Any, tmp_path: Path) -> None:
    rows = rows_of(cluster, tmp_path)
    model = fit_with_a_kill(cluster, tmp_path, rows)
    worlds = [event["after"] for event in model.events if event["kind"] in ("started", "lost")]
    assert worlds[:2] == [2, 1], "two workers, and then the survivor"
    assert [event for event in model.events if event["kind"] == "lost"]

    alone = HereEstimator(**settings(store=str(tmp_path)))
    undisturbed = alone.fit(rows)
    assert len(model.history) == EPOCHS
    for name in ("steps", "rows"):
        assert model.history[name] == undisturbed.history[name]
    for name in ("loss", "val_loss", "correct", "val_correct"):
        assert np.allclose(model.history[name], undisturbed.history[name], atol=5e-3)
    scored = model.transform(rows)
    assert scored.where("prediction = label").count() / scored.count() > 0.9


def exact() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    return {
        "model": net,
        "optimizer": optimizer,
        "consistency": "exact",
        "virtual_workers": 4,
        "gradient_clip_norm": 1.0,
        "epochs": 15,
    }


def test_every_bit_of_an_exact_fit_is_that_of_a_fit_without_the_kill(cluster: Any, tmp_path: Path) -> None:
    rows = rows_of(cluster, tmp_path)
    model = fit_with_a_kill(cluster, tmp_path, rows, **exact())
    assert [event for event in model.events if event["kind"] == "lost"]
    threads = torch.get_num_threads()
    try:
        undisturbed = HereEstimator(**settings(store=str(tmp_path), **exact())).fit(rows)
    finally:
        torch.set_num_threads(threads)
    for name in ("steps", "rows", "loss", "val_loss", "correct", "val_correct"):
        assert model.history[name] == undisturbed.history[name]
    expected = undisturbed.module.state_dict()
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, expected[name]), name
