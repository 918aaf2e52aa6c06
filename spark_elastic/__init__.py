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
    from spark_elastic.ml.callbacks import BestCheckpoint, Callback, EarlyStopping, HistoryLogger, LambdaCallback
    from spark_elastic.ml.keras.estimator import ElasticKerasEstimator
    from spark_elastic.ml.keras.model import ElasticKerasModel
    from spark_elastic.ml.load_module import load_module
    from spark_elastic.ml.torch.estimator import ElasticTorchEstimator
    from spark_elastic.ml.torch.model import ElasticTorchModel
    from spark_elastic.reporting.event_log import MembershipChange
    from spark_elastic.runs.trust import trusted_files
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
    "trusted_files",
]


# Imported on first use: workers import this package too, and need nothing of the driver's side.
_NAMES = {
    "spark_elastic.data.materialization": ("materialize",),
    "spark_elastic.data.reader": ("BatchReader",),
    "spark_elastic.data.store": ("Store",),
    "spark_elastic.diagnostics": ("doctor",),
    "spark_elastic.driver.hosts": ("FixedHosts", "HostDiscovery", "HostDiscoveryScript"),
    "spark_elastic.driver.launcher": ("LocalLauncher",),
    "spark_elastic.jobs.driver_callbacks": ("DriverCallback", "DriverResult", "DriverRun"),
    "spark_elastic.jobs.job": ("ElasticJob",),
    "spark_elastic.jobs.run": ("run", "run_async"),
    "spark_elastic.ml.callbacks": ("BestCheckpoint", "Callback", "EarlyStopping", "HistoryLogger", "LambdaCallback"),
    "spark_elastic.ml.keras.estimator": ("ElasticKerasEstimator",),
    "spark_elastic.ml.keras.model": ("ElasticKerasModel",),
    "spark_elastic.ml.load_module": ("load_module",),
    "spark_elastic.ml.torch.estimator": ("ElasticTorchEstimator",),
    "spark_elastic.ml.torch.model": ("ElasticTorchModel",),
    "spark_elastic.reporting.event_log": ("MembershipChange",),
    "spark_elastic.runs.trust": ("trusted_files",),
    "spark_elastic.spark.package": ("ship_package",),
    "spark_elastic.trackers.mlflow": ("MLflowCallback",),
    "spark_elastic.trackers.tensorboard": ("TensorBoardCallback",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


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
