"""Elastic data-parallel training of PyTorch, TensorFlow and Keras models inside Apache Spark.

`ElasticTorchEstimator` and `ElasticKerasEstimator` train on a DataFrame. `run` and `run_async` run a function in
elastic workers; inside it, use `spark_elastic.torch`, `spark_elastic.tensorflow` or `spark_elastic.keras`. All errors
are in `spark_elastic.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_elastic import errors
    from spark_elastic.data.materialization import materialize
    from spark_elastic.data.reader import BatchReader
    from spark_elastic.data.store import Store
    from spark_elastic.diagnostics import doctor
    from spark_elastic.driver.hosts import FixedHosts, HostDiscovery, HostDiscoveryScript
    from spark_elastic.driver.launcher import LocalLauncher
    from spark_elastic.jobs.driver_callbacks import DriverCallback, DriverResult, DriverRun
    from spark_elastic.jobs.job import ElasticJob
    from spark_elastic.jobs.run import run, run_async
    from spark_elastic.ml.callbacks import (
        BestCheckpoint,
        Callback,
        EarlyStopping,
        HistoryLogger,
        LambdaCallback,
    )
    from spark_elastic.ml.keras.estimator import ElasticKerasEstimator
    from spark_elastic.ml.keras.model import ElasticKerasModel
    from spark_elastic.ml.load_module import load_module
    from spark_elastic.ml.torch.estimator import ElasticTorchEstimator
    from spark_elastic.ml.torch.model import ElasticTorchModel
    from spark_elastic.reporting.event_log import MembershipChange
    from spark_elastic.spark.package import ship_package
    from spark_elastic.trackers.mlflow import MLflowCallback
    from spark_elastic.trackers.tensorboard import TensorBoardCallback

__version__ = "0.2.0"

__all__ = [
    "BatchReader",
    "BestCheckpoint",
    "Callback",
    "DriverCallback",
    "DriverResult",
    "DriverRun",
    "EarlyStopping",
    "ElasticJob",
    "ElasticKerasEstimator",
    "ElasticKerasModel",
    "ElasticTorchEstimator",
    "ElasticTorchModel",
    "FixedHosts",
    "HistoryLogger",
    "HostDiscovery",
    "HostDiscoveryScript",
    "LambdaCallback",
    "LocalLauncher",
    "MLflowCallback",
    "MembershipChange",
    "Store",
    "TensorBoardCallback",
    "doctor",
    "errors",
    "load_module",
    "materialize",
    "run",
    "run_async",
    "ship_package",
]


# Imported on first use: workers import this package too, and need nothing of the driver's side.
_MODULES = {
    "BatchReader": "spark_elastic.data.reader",
    "BestCheckpoint": "spark_elastic.ml.callbacks",
    "Callback": "spark_elastic.ml.callbacks",
    "DriverCallback": "spark_elastic.jobs.driver_callbacks",
    "DriverResult": "spark_elastic.jobs.driver_callbacks",
    "DriverRun": "spark_elastic.jobs.driver_callbacks",
    "EarlyStopping": "spark_elastic.ml.callbacks",
    "ElasticJob": "spark_elastic.jobs.job",
    "ElasticKerasEstimator": "spark_elastic.ml.keras.estimator",
    "ElasticKerasModel": "spark_elastic.ml.keras.model",
    "ElasticTorchEstimator": "spark_elastic.ml.torch.estimator",
    "ElasticTorchModel": "spark_elastic.ml.torch.model",
    "FixedHosts": "spark_elastic.driver.hosts",
    "HistoryLogger": "spark_elastic.ml.callbacks",
    "HostDiscovery": "spark_elastic.driver.hosts",
    "HostDiscoveryScript": "spark_elastic.driver.hosts",
    "LambdaCallback": "spark_elastic.ml.callbacks",
    "LocalLauncher": "spark_elastic.driver.launcher",
    "MLflowCallback": "spark_elastic.trackers.mlflow",
    "MembershipChange": "spark_elastic.reporting.event_log",
    "Store": "spark_elastic.data.store",
    "TensorBoardCallback": "spark_elastic.trackers.tensorboard",
    "doctor": "spark_elastic.diagnostics",
    "load_module": "spark_elastic.ml.load_module",
    "materialize": "spark_elastic.data.materialization",
    "run": "spark_elastic.jobs.run",
    "run_async": "spark_elastic.jobs.run",
    "ship_package": "spark_elastic.spark.package",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("spark_elastic.errors")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
