"""Log a trained model to the active MLflow run: in its framework's own flavour, and as a Spark model."""

from __future__ import annotations

import importlib
import inspect
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from spark_elastic.spark.session import cluster_of
from spark_elastic.trackers import autologging

log = logging.getLogger("spark_elastic.mlflow")

NATIVE_NAME, SPARK_NAME = "native_model", "spark_model"


def log_native(model: Any, registered_model_name: str | None = None) -> None:
    """Log the module or Keras model as `native_model`, with a signature; it loads without Spark."""
    flavour = "pytorch" if model._native_name == "module" else "keras"
    # not inferred: that would load the model in another process, which takes longer than many fits
    packages = ["torch"]
    if flavour == "keras":
        packages = ["keras", importlib.import_module("keras").backend.backend()]  # the name of its package
    _log(
        importlib.import_module(f"mlflow.{flavour}").log_model,
        getattr(model, model._native_name),
        name=NATIVE_NAME,
        signature=_signature(model),
        pip_requirements=_pinned(["mlflow", *packages, "numpy", "cloudpickle"]),
        registered_model_name=registered_model_name,
        serialization_format="pickle",  # "pt2" traces the module, which not every module allows
    )


def log_spark(model: Any, registered_model_name: str | None = None) -> None:
    """Log the Spark model as `spark_model`, unless autologging does so, or there is no session to save it with."""
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None or cluster_of(session).remote:  # MLflow saves such models through the session's JVM
        log.info("the Spark model is not logged to MLflow: there is no active SparkSession, or it is of Spark Connect")
        return
    if autologging.logs_model(model):
        return
    _log(
        importlib.import_module("mlflow.spark").log_model,
        model,
        artifact_path=SPARK_NAME,
        pip_requirements=_pinned(["mlflow", "pyspark", "spark-elastic"]),
        registered_model_name=registered_model_name,
    )


def _log(log_model: Any, model: Any, **given: Any) -> None:
    """Call a flavour's `log_model` with those arguments that this version of MLflow knows."""
    known = inspect.signature(log_model).parameters
    log_model(model, **{name: value for name, value in given.items() if name in known and value is not None})


def _signature(model: Any) -> Any:
    """Return the native model's signature; None if its inputs are not those of the fit."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    if model.tensors is None:
        return None

    def schema(side: list[dict[str, Any]]) -> Any:
        names = [each["name"] for each in side] if len(side) > 1 else [None]
        shapes = [(np.dtype(each["dtype"]), (-1, *each["shape"])) for each in side]
        return Schema([TensorSpec(*shape, name) for shape, name in zip(shapes, names, strict=True)])

    return ModelSignature(schema(model.tensors["inputs"]), schema(model.tensors["outputs"]))


def _pinned(packages: list[str]) -> list[str]:
    """Return requirements with the installed versions, without local labels ("2.5.1+cpu"), which no index has."""
    found = []
    for package in packages:
        try:
            found.append(f"{package}=={version(package).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(package)
    return found
