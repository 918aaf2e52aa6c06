"""Log a trained model to the active MLflow run: in its framework's own flavour, and as a Spark model."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
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
        signature=_native_signature(model),
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
        signature=_spark_signature(model),
        pip_requirements=_pinned(["mlflow", "pyspark", "spark-elastic"]),
        registered_model_name=registered_model_name,
    )


def _log(log_model: Any, model: Any, **given: Any) -> None:
    """Call a flavour's `log_model` with those arguments that this version of MLflow knows."""
    known = inspect.signature(log_model).parameters
    log_model(model, **{name: value for name, value in given.items() if name in known and value is not None})


def _native_signature(model: Any) -> Any:
    """Return the native model's signature; None if its inputs are not those of the fit.

    It names columns if all of them are numbers of one input, for Keras it has their type: MLflow makes one array of
    such columns. Other inputs are tensors.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    if model.tensors is None:
        return None

    def schema(side: list[dict[str, Any]]) -> Any:
        names = [each["name"] for each in side] if len(side) > 1 else [None]
        shapes = [(np.dtype(each["dtype"]), (-1, *each["shape"])) for each in side]
        return Schema([TensorSpec(*shape, name) for shape, name in zip(shapes, names, strict=True)])

    fitted, inputs = model._facts_of_fit(), schema(model.tensors["inputs"])
    (first, *others), types = fitted.inputs, _column_types(fitted)
    stacked = first.shape == (len(first.columns),) and first.dtype == "<f4" and not others
    kinds = [types[name] for name in first.columns]
    if stacked and model._native_name == "module" and all(kind in _SCALARS for kind in kinds):
        inputs = Schema([ColSpec(_SCALARS[types[name]], name) for name in first.columns])
    elif stacked and all(kind in _NUMPY for kind in kinds):  # MLflow's flavour of Keras takes tensors alone
        inputs = Schema([TensorSpec(np.result_type(*(_NUMPY[kind] for kind in kinds)), (-1, len(kinds)))])
    return ModelSignature(inputs, schema(model.tensors["outputs"]))


def _spark_signature(model: Any) -> Any:
    """Return the Spark model's signature: the columns of the features; None if MLflow has no type for one of them."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    types = {name: _mlflow_type(kind) for name, kind in _column_types(model._facts_of_fit()).items()}
    if None in types.values():
        return None
    made = model.getOrDefault("prediction_col")
    return ModelSignature(
        Schema([ColSpec(kind, name) for name, kind in types.items()]),
        Schema([ColSpec(DataType.double)]) if made == "prediction" else None,
    )


_SCALARS = {
    **dict.fromkeys(("float", "double", "decimal"), "double"),
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "long"),
    "boolean": "boolean",
}
"""Spark's types of numbers, and MLflow's: the widest of a kind, as pandas may have them."""
_NUMPY = {"float": "<f4", "double": "<f8", "tinyint": "<i1", "smallint": "<i2", "int": "<i4", "bigint": "<i8"}
"""Spark's types of numbers, and those of the columns that `toPandas` returns."""
_OTHERS = {**dict.fromkeys(("string", "char", "varchar"), "string"), "binary": "binary", "timestamp": "datetime"}


def _column_types(fitted: Any) -> dict[str, str]:
    """Return Spark's types of the columns of the features, without precisions; of stored rows, that of the tensor."""
    stored = {"f": "double", "i": "bigint", "u": "bigint", "b": "boolean"}
    of_kind = {"bytes": "binary", "string": "string", "sparse": "vector"}
    found: dict[str, str] = {}
    for field in fitted.inputs:
        plain = stored[np.dtype(field.dtype).kind]
        kind = field.kind.value
        stacked = kind == "dense" and field.shape in ((), (len(field.columns),))
        guess = of_kind.get(kind) or (plain if stacked else f"array<{plain}>")
        for name in field.columns:
            found[name] = re.sub(r"\(.*?\)", "", fitted.columns.get(name, guess))
    return found


def _mlflow_type(spark_type: str) -> Any:
    """Return MLflow's type of a Spark type; None if it has none that keeps the values."""
    from mlflow.types import schema
    from mlflow.types.schema import Array, DataType

    if spark_type == "vector":
        vector: Any = schema.SparkMLVector
        return vector()
    if spark_type.startswith("array<"):
        element = _mlflow_type(spark_type[len("array<") : -1])
        return None if element is None else Array(element)
    name = _SCALARS.get(spark_type) or _OTHERS.get(spark_type)
    return None if name is None else DataType[name]


def _pinned(packages: list[str]) -> list[str]:
    """Return requirements with the installed versions, without local labels ("2.5.1+cpu"), which no index has."""
    found = []
    for package in packages:
        try:
            found.append(f"{package}=={version(package).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(package)
    return found
