"""A Spark Connect server on a standalone cluster: executors die and come back while workers train on them."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import spark_elastic
from spark_elastic import ElasticTorchEstimator
from spark_elastic.diagnostics.findings import PROBLEM
from tests.integration.connect.server import ConnectServer
from tests.integration.processes import GONE_S, assert_gone, wait_for_file, wait_until
from tests.leftovers import Before

pytestmark = [pytest.mark.nightly, pytest.mark.cluster]


@pytest.fixture(scope="module")
def server(connect_mode):
    with ConnectServer(workers=2, settings={"spark.executor.cores": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def session(server):
    return server.session()


def test_model_is_that_of_a_fit_in_which_no_executor_was_killed(server, session, tmp_path):
    before = Before()
    points = session.range(0, 1000, 1, 2).selectExpr("cast(id % 7 - 3 as float) as x", "cast(id % 5 - 2 as float) as z")
    points = points.selectExpr("x", "z", "cast(x * 2 - z as float) as y")

    def fit(name, epochs):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        settings = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.05), "loss": torch.nn.MSELoss()}
        settings |= {"feature_cols": ["x", "z"], "label_cols": ["y"], "batch_size": 50, "epochs": epochs, "verbose": 0}
        settings |= {"store": str(tmp_path), "checkpoint_dir": str(tmp_path / name), "run_id": "a", "num_proc": 2}
        return ElasticTorchEstimator(**settings).fit(points)

    wait_until(lambda: len(server.executors()) == 2, 60, "both executors are up")
    undisturbed = fit("undisturbed", 40)
    killed = []

    def kill():
        wait_for_file(tmp_path / "disturbed", "checkpoint.json", 200, "the first checkpoint")
        killed.append(next(iter(server.executors().values())))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    (tmp_path / "disturbed").mkdir()
    killer.start()
    model = fit("disturbed", 40)  # both workers are members before the kill, however long one of them takes to start
    killer.join()
    assert killed
    assert [event for event in model.events if event["kind"] == "lost"]
    assert len(model.history) == 40
    assert np.allclose(model.history["loss"], undisturbed.history["loss"], atol=5e-3)
    rows = points.distinct()
    both = (each.transform(rows).orderBy("x", "z").collect() for each in (model, undisturbed))
    ours, theirs = ([row.prediction for row in predicted] for predicted in both)
    assert np.allclose(ours, theirs, atol=5e-2)
    assert_gone(server.workers, GONE_S)
    before.assert_no_threads_left()


def test_doctor_looks_at_the_executors_through_queries(server, session, tmp_path):
    before = Before()
    wait_until(lambda: len(server.executors()) == 2, 60, "both executors are up")
    report = spark_elastic.doctor(session, store=str(tmp_path), num_proc=2, timeout=300)
    assert report.ok, report
    assert list(tmp_path.iterdir()) == []
    assert "2 workers" in report.of("workers")[0].says
    before.assert_no_threads_left()
    command = [sys.executable, "-m", "spark_elastic", "doctor", "--json", "--remote", server.url, "-np", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    (problem,) = [each for each in json.loads(done.stdout)["findings"] if each["level"] == PROBLEM]
    assert problem["says"] == "2 task slots, busy or not; 3 are needed"
