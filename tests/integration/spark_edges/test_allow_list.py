"""A platform that lets Python call listed methods of Spark's JVM alone: the others raise py4j's security error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from py4j.protocol import Py4JError
from pyspark.sql import functions as F

import spark_elastic
from spark_elastic.errors import LaunchError, NoSparkContextError
from spark_elastic.spark.classic import ClassicCluster
from tests.integration.clusters import local, local_cluster
from tests.nightly import by_night

pytestmark = pytest.mark.cluster

OTHER_WAYS = {
    "maxNumConcurrentTasks",
    "listenerBus",
    "getExecutorIds",
    "schedulerBackend",
    "taskScheduler",
    "statusStore",
    "progressBar",
    "isStopped",
    "LinkedBlockingQueue",
}
"""What this package calls where it may, and does without elsewhere."""


class Listed:
    """An object of the JVM, and all that its methods return, without some methods; their calls are kept."""

    def __init__(self, inner: Any, barred: set[str], refused: list[str], name: str = "") -> None:
        self.__dict__.update(_inner=inner, _barred=barred, _refused=refused, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name in self._barred:
            return lambda *arguments: self._refuse(name)
        found = getattr(self._inner, name)
        if name.startswith("_") or isinstance(found, (int, str)):
            return found
        return Listed(found, self._barred, self._refused, name)

    def __call__(self, *arguments: Any) -> Any:
        returned = self._inner(*(each._inner if isinstance(each, Listed) else each for each in arguments))
        # what is returned is handed on as it is, but for the SparkContext, of which the methods are called
        return Listed(returned, self._barred, self._refused) if self._name == "sc" else returned

    def _refuse(self, name: str) -> None:
        self._refused.append(name)
        raise Py4JError(
            f"An error occurred while calling o17.{name}. Trace:\n"
            "py4j.security.Py4JSecurityException: Method public int "
            f"org.apache.spark.SparkContext.{name}() is not whitelisted on class class org.apache.spark.SparkContext\n"
            "\tat py4j.security.WhitelistingPy4JSecurityManager.checkCall(WhitelistingPy4JSecurityManager.java:473)\n"
        )


@pytest.fixture(scope="module", params=by_night(["local", "executors"], but=["local"]))
def cluster(request: pytest.FixtureRequest) -> Any:
    with local(2) if request.param == "local" else local_cluster(2, 1) as cluster:
        cluster.sc.setLogLevel("OFF")
        yield cluster


def bar(sc: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Have the JVM refuse calls of these names; return the list of the calls that it has refused."""
    refused: list[str] = []
    monkeypatch.setattr(sc, "_jsc", Listed(sc._jsc, set(names), refused))
    monkeypatch.setattr(sc, "_jvm", Listed(sc._jvm, set(names), refused))
    return refused


def test_job_runs_to_its_end_where_the_scheduler_may_not_be_asked(cluster: Any, monkeypatch: Any) -> None:
    slots = ClassicCluster(cluster.sc).count_slots().now
    refused = bar(cluster.sc, monkeypatch, *OTHER_WAYS)

    def train() -> tuple[int, float]:
        import torch

        import spark_elastic.torch as hvd

        hvd.init()
        return hvd.size(), float(hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum))

    assert ClassicCluster(cluster.sc).count_slots().now == slots == 2
    assert spark_elastic.run(train, spark=cluster.sc, verbose=0) == [(2, 1.0)] * 2
    assert {"maxNumConcurrentTasks", "LinkedBlockingQueue", "isStopped"} <= set(refused)
    with pytest.raises(spark_elastic.errors.UserFunctionError, match="ZeroDivisionError"):
        spark_elastic.run(lambda: 1 / 0, num_proc=1, spark=cluster.sc, verbose=0)


def test_estimator_fits_transforms_and_saves_there(cluster: Any, monkeypatch: Any, tmp_path: Path) -> None:
    spark = cluster.spark
    rows = spark.range(80).select(F.col("id").cast("double").alias("x"), (F.col("id") * 2).cast("float").alias("y"))
    refused = bar(cluster.sc, monkeypatch, *OTHER_WAYS, "hadoopConfiguration")
    monkeypatch.setattr(spark, "_jsc", cluster.sc._jsc)
    net = torch.nn.Linear(1, 1)
    fitted = spark_elastic.ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        store=str(tmp_path / "store"),
        num_proc=1,
        verbose=0,
    )
    model = fitted.fit(rows)
    model.save(str(tmp_path / "model"))
    assert {"maxNumConcurrentTasks", "hadoopConfiguration"} <= set(refused)
    loaded = spark_elastic.ElasticTorchModel.load(str(tmp_path / "model"))
    predicted = loaded.predict(rows.toPandas())["prediction"]
    expected = net(torch.arange(80.0)[:, None]).detach().squeeze().tolist()
    assert predicted.tolist() == pytest.approx(expected, abs=1e-4)
    assert [row.prediction for row in model.transform(rows).collect()] == pytest.approx(expected, abs=1e-4)


def test_call_that_no_job_can_do_without_is_named(cluster: Any, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        bar(cluster.sc, patch, "getLocalProperties")
        said = r"does not allow Python to call org.apache.spark.SparkContext.getLocalProperties of Spark.*dedicated"
        with pytest.raises(NoSparkContextError, match=said):
            spark_elastic.run(print, num_proc=1, spark=cluster.sc, verbose=0)
    bar(cluster.sc, monkeypatch, "setProperty", "cancelJob")
    assert spark_elastic.run(lambda: 5, num_proc=1, spark=cluster.sc, verbose=0) == [5]
    with monkeypatch.context() as patch:
        patch.setattr("spark_elastic.spark.slot_jobs.SlotJobs.submit", lambda *_, **__: refuse_submission())
        with pytest.raises(LaunchError, match=r"does not allow Python to call .*JavaRDD.collectAsync of Spark"):
            spark_elastic.run(print, num_proc=1, spark=cluster.sc, verbose=0)


def refuse_submission() -> None:
    raise Py4JError(
        "An error occurred while calling o17.collectAsync. Trace:\n"
        "py4j.security.Py4JSecurityException: Method public org.apache.spark.api.java.JavaFutureAction "
        "org.apache.spark.api.java.JavaRDD.collectAsync() is not whitelisted "
        "on class class org.apache.spark.api.java.JavaRDD\n\tat py4j.Gateway.invoke(Gateway.java:294)"
    )
