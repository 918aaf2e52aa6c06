"""Estimators on a Spark Connect server: fit, transform, Spark ML's tools, saved models."""

import time

import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator

from spark_elastic import ElasticTorchEstimator, ElasticTorchModel
from spark_elastic.errors import CheckpointError, DataError, DriverUnreachableError
from spark_elastic.spark.connect_session import Sent
from tests.integration.connect.server import ConnectServer
from tests.integration.processes import GONE_S, assert_gone
from tests.leftovers import Before

ROWS = 600


@pytest.fixture(scope="module")
def server(connect_mode):
    with ConnectServer("local[3]") as server:
        yield server


@pytest.fixture(scope="module")
def session(server):
    session = server.session()
    kind = type(session)
    kind._set_default_and_active_session(session)
    yield session
    kind._default_session = kind._active_session.session = None


@pytest.fixture(autouse=True)
def nothing_left(server, session):
    before = Before()
    yield
    assert_gone(server.workers, GONE_S)
    before.assert_no_threads_left()


@pytest.fixture(scope="module")
def points(session):
    terms = "cast(id % 7 as float) as `a.b`", "cast(id % 5 as float) as z", "cast((id % 7) * 2 + id % 5 as float) as y"
    return session.range(0, ROWS).selectExpr(*terms)


def estimator(**changes):
    torch.manual_seed(3)
    net = changes.pop("net", None) or torch.nn.Linear(2, 1)
    settings = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.1),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["a.b", "z"],
        "label_cols": ["y"],
        "epochs": 4,
        "num_proc": 2,
        "verbose": 0,
        **changes,
    }
    return ElasticTorchEstimator(**settings)


@pytest.fixture(scope="module")
def model(points):
    wide = torch.nn.Sequential(torch.nn.Linear(2, 300), torch.nn.ReLU(), torch.nn.Linear(300, 300), torch.nn.ReLU())
    wide.append(torch.nn.Linear(300, 1))
    return estimator(net=wide, optimizer=torch.optim.Adam(wide.parameters(), lr=0.01)).fit(points)


def rmse(predicted):
    return RegressionEvaluator(labelCol="y", metricName="rmse").evaluate(predicted)


def test_fitted_model_predicts_on_the_executors(model, points):
    predicted = model.transform(points)
    assert rmse(predicted) < 1.0
    assert predicted.columns == ["a.b", "z", "y", "output", "prediction"]
    sent = model._shipments.popitem()[1][1]
    assert isinstance(sent, Sent)
    assert sent.file  # too large to travel in each query


def test_saved_model_is_loaded_and_predicts_the_same(model, points, tmp_path):
    path = str(tmp_path / "model")
    model.save(path)
    with pytest.raises(CheckpointError, match="exists; save to another path"):
        model.save(path)
    model.write().overwrite().save(path)
    loaded = ElasticTorchModel.load(path)
    distinct = points.distinct()  # 35 rows, in any order
    assert sorted(loaded.transform(distinct).collect()) == sorted(model.transform(distinct).collect())
    (tmp_path / "model/data").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is incomplete: data/.* is missing"):
        ElasticTorchModel.load(path)


def test_rows_that_cannot_be_stored_are_named(session, points):
    damaged = session.range(0, 10).selectExpr("cast(if(id = 7, null, id) as float) as `a.b`", "1f as z", "1f as y")
    with pytest.raises(DataError, match=r"'a\.b'.*null"):
        estimator().fit(damaged)
    failing = points.selectExpr("`a.b`", "assert_true(z < 4) is null as q", "z", "y").filter("q")
    with pytest.raises(DataError, match="could not be written"):
        estimator(data_options={"allow_nan": False}).fit(failing)


def test_fit_that_executors_cannot_reach_is_refused_before_rows_are_written(session, points, tmp_path):
    began = time.monotonic()
    fitted = estimator(store=str(tmp_path), run_options={"driver_host": "192.0.2.1"})
    with pytest.raises(DriverUnreachableError, match=r"192\.0\.2\.1: .*name the address .*driver_host="):
        fitted.fit(points)
    assert time.monotonic() - began < 10.0
    assert not list(tmp_path.rglob("*manifest*"))
