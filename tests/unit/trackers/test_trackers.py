"""The trackers without a fit: missing extras, wrong arguments, the workers' variables."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic import DriverCallback, MLflowCallback, TensorBoardCallback
from spark_elastic.errors import InvalidSettingsError, MissingExtraError
from spark_elastic.jobs.driver_callbacks import DriverResult, DriverRun
from spark_elastic.jobs.tracking import tracking_environment, warn_of_local_store
from spark_elastic.ml.persistence import plain_and_objects
from tests.unit.ml.torch.estimators import estimator


@pytest.mark.parametrize(
    ("package", "make"), [("mlflow", MLflowCallback), ("tensorboard", lambda: TensorBoardCallback("logs"))]
)
def test_missing_package_is_reported_with_its_extra(package: str, make: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"extra \[{package}\]"):
        make()


def test_unknown_kind_of_model_is_reported() -> None:
    with pytest.raises(InvalidSettingsError, match='must be a list of "native" and "spark", not \'onnx\''):
        MLflowCallback(log_models=["native", "onnx"])


def active(uri: str) -> Any:
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1", experiment_id="7"))
    return SimpleNamespace(active_run=lambda: run, get_tracking_uri=lambda: uri)


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("http://tracking:5000", "http://tracking:5000"),
        ("sqlite:///runs.db", "sqlite:///{here}/runs.db"),
        ("sqlite:////data/runs.db", "sqlite:////data/runs.db"),
        ("mlruns", "file://{here}/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("databricks", "databricks"),
        ("databricks-uc", "databricks-uc"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_active_run_reaches_the_workers_environment(uri: str, absolute: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", active(uri))
    env = tracking_environment()
    assert env["MLFLOW_TRACKING_URI"] == absolute.format(here=tmp_path)
    assert (env["MLFLOW_RUN_ID"], env["MLFLOW_EXPERIMENT_ID"]) == ("r1", "7")


def test_nothing_travels_without_an_active_run(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: None))
    assert tracking_environment() == {}
    monkeypatch.delitem(sys.modules, "mlflow")
    assert tracking_environment() == {}
    assert "mlflow" not in sys.modules


@pytest.mark.parametrize(
    ("uri", "warns"), [("sqlite:////data/runs.db", True), ("http://tracking:5000", False), ("databricks", False)]
)
def test_store_on_the_drivers_disk_is_warned_of(uri: str, warns: bool, caplog: Any) -> None:
    warn_of_local_store({"MLFLOW_RUN_ID": "r1", "MLFLOW_TRACKING_URI": uri})
    assert bool(caplog.records) == warns


def test_server_that_never_answers_does_not_hold_the_exit_of_the_program(monkeypatch: Any, caplog: Any) -> None:
    asked, answered = threading.Event(), threading.Event()

    def log_batch(*_: Any, **__: Any) -> None:
        asked.set()
        answered.wait()

    def start_run(fit: Any) -> None:
        fit.run_id = "r1"
        fit._client = SimpleNamespace(log_batch=log_batch)

    monkeypatch.setattr("spark_elastic.trackers.mlflow._MLflowFit._start_run", start_run)
    monkeypatch.setattr("spark_elastic.trackers.mlflow.END_WAIT_S", 0.1)
    tracker = MLflowCallback()
    tracker.log_settings = False
    tracker.on_fit_start(DriverRun("E"))
    tracker.on_fit_end(DriverResult())
    assert asked.wait(10)
    threads = [each for each in threading.enumerate() if each.name.startswith("spark_elastic mlflow")]
    answered.set()
    for each in threads:
        each.join()
    assert [each.daemon for each in threads] == [True]
    assert "is incomplete" in caplog.text


def test_driver_callbacks_are_not_saved_with_an_estimator(caplog: Any) -> None:
    class Mine(DriverCallback):
        pass

    plain, objects, _ = plain_and_objects(estimator(callbacks=[Mine()]))
    assert plain["callbacks"] is None
    assert "callbacks" not in objects
    assert "Mine of HereEstimator is not saved with it" in caplog.text


def test_password_in_the_address_of_a_server_is_not_logged(caplog: Any) -> None:
    warn_of_local_store({"MLFLOW_RUN_ID": "r1", "MLFLOW_TRACKING_URI": "file://me:secret@/data"})
    assert "secret" not in caplog.text


@pytest.mark.parametrize("where", ["s3://bucket/logs", "dbfs:/logs", "file:///tmp/logs"])
def test_logs_at_a_uri_are_refused(where: str) -> None:
    with pytest.raises(InvalidSettingsError, match="log_dir must be a folder of the driver's machine, not the URI"):
        TensorBoardCallback(where)


def test_folder_for_logs_that_cannot_be_made_is_reported_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettingsError, match=r"cannot write to .*file/first: .*give a log_dir"):
        TensorBoardCallback(tmp_path / "file", run_name="first").on_fit_start(DriverRun("E"))


def test_events_of_a_fit_within_another_go_to_its_own_logs_and_all_files_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    logs = TensorBoardCallback(tmp_path)
    for name in ("outer", "inner"):
        logs.on_fit_start(DriverRun("E", run_id=name))
    for rows in (1, 3):
        for epoch in range(rows):
            logs.on_epoch_end({"epoch": epoch, "ended": 1.0, "loss": 0.5})
        logs.on_fit_end(DriverResult())
    sizes = {path.parent.name: path.stat().st_size for path in tmp_path.rglob("events.*")}
    assert sizes["outer"] > sizes["inner"]
    assert len(os.listdir("/proc/self/fd")) == before
