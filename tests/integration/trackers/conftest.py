"""One tracking server and one dataset for all tests of a module here, and a guard for what is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from spark_elastic.data.dataset import Dataset
from tests.integration.processes import GONE_S, MARK, OF_THIS_PROCESS, assert_gone, left_by_jobs
from tests.integration.tracking_server import TrackingServer, tracking_server
from tests.unit.ml.torch.estimators import make_set


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    with tracking_server(tmp_path_factory.mktemp("tracking")) as running:
        yield running


@pytest.fixture
def mlflow(server: TrackingServer) -> Iterator[Any]:
    """MLflow with this server, and without an active run before and after."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server.uri)
    yield mlflow
    left = mlflow.active_run()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)
    assert left is None, "a run was left active"


@pytest.fixture(autouse=True)
def no_worker_left() -> Iterator[None]:
    os.environ[MARK] = OF_THIS_PROCESS
    yield
    del os.environ[MARK]
    assert_gone(left_by_jobs, GONE_S)
