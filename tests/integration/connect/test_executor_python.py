"""Executors of a Spark Connect server whose Python is not this program's: it lacks this package, or more."""

import subprocess
import sys

import pytest
import torch

import spark_elastic
from spark_elastic import ElasticTorchEstimator, ElasticTorchModel
from spark_elastic.errors import ExecutorPythonError
from tests.integration.connect.server import ConnectServer
from tests.integration.processes import GONE_S, assert_gone
from tests.leftovers import Before

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python of the same version without any package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin/python")


def test_package_is_shipped_to_executors_that_lack_it(connect_mode, bare, tmp_path):
    with ConnectServer("local[2]", package=False, python=bare) as server:
        session = server.session()
        before = Before()

        def train():  # pickled by value: executors lack the tests too
            import torch

            import spark_elastic
            import spark_elastic.torch as hvd

            hvd.init()
            return spark_elastic.__file__, float(hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)[0])

        with pytest.raises(ExecutorPythonError, match=r"bare.*ship_package=True.*Spark Connect's server starts"):
            spark_elastic.run(train, num_proc=2, spark=session, verbose=0)
        points = session.range(0, 200).selectExpr("cast(id % 7 as float) as x", "cast(id % 7 as float) as y")
        net = torch.nn.Linear(1, 1)
        settings = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.01), "loss": torch.nn.MSELoss(), "epochs": 2}
        settings |= {"feature_cols": ["x"], "label_cols": ["y"], "num_proc": 2, "verbose": 0}
        with pytest.raises(ExecutorPythonError, match="it has no spark_elastic"):
            ElasticTorchEstimator(model=net, **settings).fit(points)
        model = ElasticTorchEstimator(model=net, run_options={"ship_package": True}, **settings).fit(points)
        assert len(model.transform(points).collect()) == 200
        model.save(str(tmp_path / "model"))
        results = spark_elastic.run(train, num_proc=2, spark=session, ship_package=True, verbose=0)
        assert [total for _, total in results] == [2.0, 2.0]
        assert all(".zip/" in path for path, _ in results)

        another = server.session()
        loaded = ElasticTorchModel.load(str(tmp_path / "model"))
        fresh = another.range(0, 20).selectExpr("cast(id as float) as x", "0f as y")
        with pytest.raises(ExecutorPythonError, match="it has no spark_elastic"):
            loaded.transform(fresh).collect()
        spark_elastic.ship_package(another)
        assert len(loaded.transform(fresh).collect()) == 20
        assert_gone(server.workers, GONE_S)
        before.assert_no_threads_left()
