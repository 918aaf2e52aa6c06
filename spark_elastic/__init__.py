"""Elastic data-parallel training of PyTorch, TensorFlow and Keras models inside Apache Spark.

`ElasticTorchEstimator` and `ElasticKerasEstimator` train on a DataFrame. `run` and `run_async` start a job of your own;
`spark_elastic.torch`, `spark_elastic.tensorflow` and `spark_elastic.keras` are what the function in it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_elastic import moved

if TYPE_CHECKING:
    from spark_elastic.data.materialization import materialize
    from spark_elastic.data.reader import BatchReader
    from spark_elastic.data.store import Store
    from spark_elastic.diagnostics import doctor
    from spark_elastic.driver.hosts import FixedHosts, HostDiscovery, HostDiscoveryScript
    from spark_elastic.driver.local_launcher import LocalLauncher
    from spark_elastic.jobs.job import ElasticJob
    from spark_elastic.jobs.run import run, run_async
    from spark_elastic.ml.keras.estimator import ElasticKerasEstimator
    from spark_elastic.ml.keras.model import ElasticKerasModel
    from spark_elastic.ml.torch.estimator import ElasticTorchEstimator
    from spark_elastic.ml.torch.model import ElasticTorchModel

__version__ = "0.1.0"

moved.install()

# Resolved on first use: a worker imports this package too, and needs none of the driver's side.
_HOMES = {
    "run": "spark_elastic.jobs.run",
    "run_async": "spark_elastic.jobs.run",
    "BatchReader": "spark_elastic.data.reader",
    "ElasticJob": "spark_elastic.jobs.job",
    "ElasticKerasEstimator": "spark_elastic.ml.keras.estimator",
    "ElasticKerasModel": "spark_elastic.ml.keras.model",
    "ElasticTorchEstimator": "spark_elastic.ml.torch.estimator",
    "ElasticTorchModel": "spark_elastic.ml.torch.model",
    "LocalLauncher": "spark_elastic.driver.local_launcher",
    "FixedHosts": "spark_elastic.driver.hosts",
    "HostDiscovery": "spark_elastic.driver.hosts",
    "HostDiscoveryScript": "spark_elastic.driver.hosts",
    "Store": "spark_elastic.data.store",
    "doctor": "spark_elastic.diagnostics",
    "materialize": "spark_elastic.data.materialization",
}

__all__ = [
    "BatchReader",
    "ElasticJob",
    "ElasticKerasEstimator",
    "ElasticKerasModel",
    "ElasticTorchEstimator",
    "ElasticTorchModel",
    "FixedHosts",
    "HostDiscovery",
    "HostDiscoveryScript",
    "LocalLauncher",
    "Store",
    "doctor",
    "materialize",
    "run",
    "run_async",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
