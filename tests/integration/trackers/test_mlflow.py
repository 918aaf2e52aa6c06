"""Fits that are logged to a real MLflow server, which may die, from workers that may be killed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2

import spark_elastic
from spark_elastic import DriverCallback, ElasticKerasModel, LocalLauncher, MLflowCallback
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import TensorField
from spark_elastic.jobs.driver_callbacks import CallbackSession, DriverResult, DriverRun
from spark_elastic.jobs.tracking import fits_of
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.fitted import Fitted
from spark_elastic.trackers.mlflow import _MLflowFit
from spark_elastic.trackers.mlflow_models import log_native
from tests.integration.local.driver_fits import At, Killing, Pids, estimator
from tests.integration.tracking_server import tracking_server

pytestmark = pytest.mark.nightly


def points(mlflow: Any, run_id: str | None, name: str) -> list[tuple[int, float]]:
    """The metric's (step, value)s, as they were logged."""
    return [(each.step, each.value) for each in mlflow.MlflowClient().get_metric_history(run_id, name)]


def test_fit_with_a_kill_is_a_run_with_settings_epochs_events_plot_and_model(
    mlflow: Any, rows: Dataset, tmp_path: Path
) -> None:
    tracker = MLflowCallback(run_name="stormy", tags={"team": "blue"})
    killing = Killing(tmp_path, (1,))
    model = estimator(Pids(tmp_path), killing, tracker, num_proc=3).from_dataset_path(rows)
    client = mlflow.MlflowClient()
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "stormy"
    assert run.data.params["batch_size"] == "16"
    assert run.data.params["loss"] == "CrossEntropyLoss()"
    assert "checkpoint_dir" not in run.data.params
    assert not [value for value in run.data.params.values() if " at 0x" in value or value == "None"]
    assert points(mlflow, tracker.run_id, "loss") == list(enumerate(model.history["loss"]))
    assert points(mlflow, tracker.run_id, "val_loss") == list(enumerate(model.history["val_loss"]))
    workers = points(mlflow, tracker.run_id, "workers")
    assert (0, 3.0) in workers
    assert (2, 2.0) in workers, "one was killed while epoch 1 ended"
    assert run.data.tags["spark_elastic.lost"] == "1"
    assert run.data.tags["team"] == "blue"
    artifacts = {each.path for each in client.list_artifacts(tracker.run_id, "spark_elastic")}
    assert artifacts == {f"spark_elastic/{name}" for name in ("events.json", "events.txt", "plot.png")}
    served = mlflow.pyfunc.load_model(f"runs:/{tracker.run_id}/native_model")
    assert served.metadata.signature.inputs.inputs[0].shape == (-1, 6)
    features = np.ones((5, 6), np.float32)
    own = model.module(__import__("torch").from_numpy(features)).detach().numpy()
    assert np.allclose(served.predict(features), own)


def test_active_run_is_logged_to_and_left_active_and_a_nested_run_is_its_child(mlflow: Any, rows: Dataset) -> None:
    same, below = MLflowCallback(log_models=[]), MLflowCallback(log_models=[], nested=True)
    with mlflow.start_run() as active:
        mlflow.log_param("seed", "mine")
        estimator(same, num_proc=1, epochs=2).from_dataset_path(rows)
        assert mlflow.active_run().info.run_id == active.info.run_id == same.run_id
        assert mlflow.active_run().info.status == "RUNNING"
        estimator(below, num_proc=1, epochs=1).from_dataset_path(rows)
        assert mlflow.active_run().info.run_id == active.info.run_id
    assert len(points(mlflow, same.run_id, "loss")) == 2, "once each"
    run, child = (mlflow.get_run(each.run_id) for each in (same, below))
    assert run.data.params["seed"] == "mine", "what the user has logged stays"
    assert run.data.params["epochs"] == "2"
    assert child.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert child.info.status == run.info.status == "FINISHED"


class LogsInWorker(Callback):
    """A callback of the user's own that logs from the workers."""

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        import mlflow

        if run.rank == 0:
            mlflow.log_metrics({"own_loss": logs["loss"]}, step=run.epoch)


def test_worker_that_calls_mlflow_reaches_the_run_of_the_driver(
    mlflow: Any, rows: Dataset, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = MLflowCallback(log_models=[])
    model = estimator(LogsInWorker(), tracker, epochs=2, min_num_proc=2).from_dataset_path(rows)
    assert points(mlflow, tracker.run_id, "own_loss") == list(enumerate(model.history["loss"]))
    assert mlflow.get_run(tracker.run_id).info.status == "FINISHED"

    def work() -> str:
        import mlflow as in_worker

        in_worker.log_metric("from_run", 3.0)
        return str(in_worker.active_run().info.run_id)

    with mlflow.start_run() as active:
        returned = spark_elastic.run(work, num_proc=1, launcher=LocalLauncher(), verbose=0)
        assert mlflow.get_run(active.info.run_id).info.status == "RUNNING"
    assert returned == [active.info.run_id]
    assert points(mlflow, active.info.run_id, "from_run") == [(0, 3.0)]
    assert list(tmp_path.iterdir()) == [], "no database of a worker"


def test_server_that_dies_and_comes_back_gets_all_epochs(mlflow: Any, rows: Dataset, tmp_path: Path) -> None:
    with tracking_server(tmp_path) as dying:
        mlflow.set_tracking_uri(dying.uri)
        tracker = MLflowCallback(log_models=[])
        model = estimator(At(1, dying.stop), tracker, At(3, dying.start), num_proc=1).from_dataset_path(rows)
        assert points(mlflow, tracker.run_id, "loss") == list(enumerate(model.history["loss"]))
        assert mlflow.get_run(tracker.run_id).info.status == "FINISHED"


def test_fit_ends_well_without_a_server(mlflow: Any, rows: Dataset, caplog: Any) -> None:
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    model = estimator(MLflowCallback(), num_proc=1).from_dataset_path(rows)
    assert len(model.history) == 4
    warned = [each.message for each in caplog.records if each.name == "spark_elastic.mlflow"]
    (said,) = warned
    assert said.startswith("the run could not be logged to MLflow")


def test_failed_fit_is_a_failed_run_with_its_error(mlflow: Any, rows: Dataset) -> None:
    class Wrong(Exception):
        pass

    def fail() -> None:
        raise Wrong("too bad")

    tracker = MLflowCallback()
    with pytest.raises(Wrong):
        estimator(tracker, At(1, fail), num_proc=1).from_dataset_path(rows)
    run = mlflow.get_run(tracker.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["spark_elastic.error"] == "Wrong: too bad"
    assert [step for step, _ in points(mlflow, tracker.run_id, "loss")] == [0, 1]


def fit_of(*callbacks: DriverCallback, epochs: int = 1, values: dict[str, float] | None = None) -> None:
    """The events of a fit without workers."""
    session = CallbackSession(callbacks)
    with session.fit(DriverRun("E", epochs=epochs)):
        for epoch in range(epochs):
            session.epoch_ended({"epoch": epoch, "ended": 1.0, "loss": 0.5, **(values or {})}, None)
        session.job_over()
        session.deliver()
        session.succeeded(DriverResult())


def test_fits_of_a_search_are_children_of_the_run_that_was_active_where_it_began(mlflow: Any) -> None:
    tracker = MLflowCallback(log_models=[], nested=True)
    with mlflow.start_run() as parent:
        found: list[str | None] = []

        def one_of_the_search() -> None:
            with fits_of(parent.info.run_id):
                fit_of(tracker)
            found.append(tracker.run_id)

        thread = threading.Thread(target=one_of_the_search)
        thread.start()
        thread.join()
        assert mlflow.get_run(found[0]).data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert mlflow.get_run(found[0]).info.status == "FINISHED"


def failing(function: Any, error: Exception, times: int) -> Any:
    """Return the function, which fails at its first calls."""
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return function(*args, **kwargs)

    return call


def test_what_a_server_never_takes_holds_up_nothing_else(mlflow: Any, monkeypatch: Any, caplog: Any) -> None:
    broken = MlflowException("database error", error_code=databricks_pb2.INTERNAL_ERROR)
    monkeypatch.setattr(_MLflowFit, "_log_settings", failing(None, broken, 100))
    monkeypatch.setattr(mlflow.MlflowClient, "log_dict", failing(None, OSError("no rights on the bucket"), 100))
    tracker = MLflowCallback(log_models=[])
    fit_of(tracker, epochs=6)
    assert points(mlflow, tracker.run_id, "loss") == [(epoch, 0.5) for epoch in range(6)]
    run = mlflow.get_run(tracker.run_id)
    assert run.data.tags["spark_elastic.lost"] == "0", "the outcome does not depend on the artifacts"
    assert run.info.status == "FINISHED"
    said = [record.message for record in caplog.records if record.name == "spark_elastic.mlflow"]
    assert sum("the settings could not be logged" in text for text in said) == 1
    assert sum("the events could not be logged" in text for text in said) == 1


@pytest.mark.nightly
def test_keras_model_takes_a_pandas_frame_of_the_training_columns(mlflow: Any) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    inputs = TensorField("features_0", ("a", "b", "c"), "<f4", (3,))
    columns = {"a": "double", "b": "int", "c": "float"}
    model = ElasticKerasModel()
    model._attach(net, Fitted((inputs,), (OutputShape("<f4", (2,)),), columns=columns))
    with mlflow.start_run() as run:
        log_native(model)
    served = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/native_model")
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": np.array([3, 4], np.int32), "c": np.array([5, 6], np.float32)})
    expected = net.predict(frame.to_numpy(np.float32), verbose=0)
    assert np.allclose(served.predict(frame), expected, atol=1e-5)
    assert np.allclose(np.stack(list(model.predict(frame)["output"])), expected, atol=1e-5)
