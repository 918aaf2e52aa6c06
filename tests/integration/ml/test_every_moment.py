"""Executors die at every moment of `fit`, and neither what was learnt nor what is left behind shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.data.catalog import delete_temporary
from tests.integration.clusters import Cluster, local_cluster
from tests.integration.ml.holding import Hold, HoldingCallback, StepLog
from tests.integration.processes import children, is_running, wait_for_file, wait_until
from tests.unit.ml.torch.estimators import HereEstimator

EPOCHS, STEPS = 3, 8  # an epoch


@pytest.fixture(scope="module")
def cluster() -> Any:
    with local_cluster(workers=2, cores=1, memory_mb=1024) as made:
        made.sc.setLogLevel("OFF")
        yield made


@pytest.fixture
def hold(cluster: Cluster, tmp_path: Path) -> Hold:
    cluster.wait_for_executors(2)  # those that the test before has killed are there again
    folder = tmp_path / "hold"
    folder.mkdir()
    return Hold(folder)


def table(spark: Any) -> Any:
    """1,000 rows; 800 of them are trained on."""
    df = spark.range(0, 1000, 1, 4).withColumn("id", F.col("id"))
    return df.select(
        (F.col("id") % 97 / 97).alias("a"),
        (F.col("id") % 31 / 31).alias("b"),
        (F.col("id") % 7 / 7).alias("y"),
        (F.col("id") % 5 == 0).alias("aside"),
    )


def mean_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label.view_as(output)).abs().mean()


def settings(store: Path, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.01),
        "loss": nn.MSELoss(),
        "metrics": {"error": mean_error},
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "validation": "aside",
        "batch_size": 100,
        "epochs": EPOCHS,
        "store": str(store),
        "verbose": 0,
        **changes,
    }


def fit_on(cluster: Cluster, store: Path, **changes: Any) -> Any:
    estimator = ElasticTorchEstimator(**settings(store, num_proc=2, min_num_proc=1, **changes))
    return estimator.fit(table(cluster.spark))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return HereEstimator(**settings(tmp_path_factory.mktemp("undisturbed"))).fit(table(cluster.spark))


def kill_executors_of(cluster: Cluster, pids: list[int]) -> None:
    owners = {name for name, jvm in cluster.executors().items() if set(children(jvm)) & set(pids)}
    assert owners, "they run in executors"
    below = {pid for name in owners for pid in children(cluster.executors()[name])}
    for name in owners:
        cluster.kill_executor(name)
    # Its workers notice that a little later, and must not be let go on before.
    wait_until(lambda: not any(is_running(pid) for pid in below), 60, "what ran in it is gone")


def when(hold: Hold, count: int, kill: Callable[[list[int]], None]) -> threading.Thread:
    """On a thread: once `count` processes stand, kill, and let the others go on."""

    def work() -> None:
        try:
            kill(hold.wait_for(count))
        finally:
            hold.release()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def assert_same(model: Any, undisturbed: Any) -> None:
    for name in ("epoch", "steps", "rows", "lr"):
        assert model.history[name] == undisturbed.history[name]
    for name in ("loss", "val_loss", "error", "val_error"):
        assert np.allclose(model.history[name], undisturbed.history[name], rtol=1e-4)
    for name, value in model.module.state_dict().items():
        assert torch.allclose(value, undisturbed.module.state_dict()[name], atol=1e-4)


def assert_nothing_left(cluster: Cluster, store: Path) -> None:
    tracker = cluster.sc.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), 20, "no Spark job is left")
    ours = lambda: [line for line in cluster.processes().values() if "spark_elastic.task" in line]  # noqa: E731
    wait_until(lambda: not ours(), 20, "no worker is left")
    assert not [path for path in (store / "runs").rglob("*") if path.is_file()]
    assert not list(store.rglob("leases/*"))


def test_rank_0_and_its_executor_may_die_at_the_end(
    cluster: Cluster, hold: Hold, tmp_path: Path, undisturbed: Any
) -> None:
    killer = when(hold, 1, lambda pids: kill_executors_of(cluster, pids))
    model = fit_on(cluster, tmp_path, callbacks=[HoldingCallback(hold, "on_fit_end", EPOCHS * STEPS)])
    killer.join()
    assert [row for row in model.events if row["kind"] == "lost"]
    assert_same(model, undisturbed)
    assert_nothing_left(cluster, tmp_path)


@pytest.mark.nightly
def test_when_all_workers_are_lost_fit_goes_on_from_the_last_checkpoint(
    cluster: Cluster, hold: Hold, tmp_path: Path, undisturbed: Any
) -> None:
    def kill(pids: list[int]) -> None:
        wait_for_file(tmp_path, "checkpoint.json", 60, "the checkpoint of the first epoch")
        kill_executors_of(cluster, pids)

    log = tmp_path / "steps"
    callbacks = [HoldingCallback(hold, "on_batch_end", STEPS + 3, everybody=True), StepLog(log)]
    killer = when(hold, 2, kill)
    model = fit_on(cluster, tmp_path, checkpoint_dir=str(tmp_path / "lasting"), run_id="a", callbacks=callbacks)
    killer.join()
    # Both died before they could write down the third step of the second epoch.
    applied = [*range(1, STEPS + 3), *range(STEPS + 1, EPOCHS * STEPS + 1)]
    assert [int(line) for line in log.read_text().split()] == applied
    assert_same(model, undisturbed)
    assert_nothing_left(cluster, tmp_path)
    delete_temporary()  # as at the end of a process
    assert not list(tmp_path.rglob("manifest.json"))
