"""The run of a tracker that is active in the driver, for the workers' environment.

A callback or function of the user's own that calls `mlflow.log_metrics` in a worker shall reach the driver's run.
Without these variables, each worker would open a database of its own in its working directory.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spark_elastic.redaction import redacted
from spark_elastic.settings import TRACKED_RUN

log = logging.getLogger("spark_elastic")

_URI, _RUN, _EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"
_STORES_BY_NAME = ("databricks", "databricks-uc", "uc")
"""Tracking URIs without a scheme that are no folders."""
_search = ContextVar[str | None]("search", default=None)


def active_run_id() -> str | None:
    """Return the id of the MLflow run that is active on this thread; None without one."""
    mlflow: Any = sys.modules.get("mlflow")
    try:
        active = None if mlflow is None else mlflow.active_run()
        return None if active is None else str(active.info.run_id)
    except Exception:  # a tracker must not keep a training from starting
        return None


@contextlib.contextmanager
def fits_of(run_id: str | None) -> Iterator[None]:
    """Let fits in the block know the run that was active where their search began: its threads have none."""
    before = _search.set(run_id)
    try:
        yield
    finally:
        _search.reset(before)


def search_run_id() -> str | None:
    """Return the run that `fits_of` has set on this thread; None outside of such a block."""
    return _search.get()


def tracking_environment() -> dict[str, str]:
    """Return the variables by which MLflow in a worker finds the run that is active on this thread.

    Empty without an active run. Credentials are not among them: `MLFLOW_TRACKING_TOKEN` and the like reach workers
    only through their own environment or `run_options={"env": ...}`.
    """
    mlflow: Any = sys.modules.get("mlflow")
    try:
        if mlflow is None or (active := mlflow.active_run()) is None:
            return {}
        return {
            _URI: _absolute(mlflow.get_tracking_uri()),
            _RUN: active.info.run_id,
            TRACKED_RUN: active.info.run_id,
            _EXPERIMENT: active.info.experiment_id,
        }
    except Exception as error:  # a tracker must not keep a training from starting
        log.warning("the workers will not know the active MLflow run: %s: %s", type(error).__name__, redacted(error))
        return {}


def warn_of_local_store(env: Mapping[str, str]) -> None:
    """Warn if workers on other machines cannot reach the tracking store, because it is a file of the driver's disk."""
    uri = env.get(_URI, "")
    if _RUN in env and uri not in _STORES_BY_NAME and urlsplit(uri).scheme in ("", "file", "sqlite"):
        log.warning(
            "the MLflow run that is active here is stored in %s, a file that workers on other machines cannot reach "
            "unless the path is shared: what they log would be lost or raise. MLflowCallback is not affected, because "
            "it logs from the driver; for mlflow calls in workers, use a tracking server (mlflow.set_tracking_uri)",
            redacted(uri),
        )


def _absolute(uri: str) -> str:
    """Return a tracking URI that means the same in every working directory of this machine."""
    parts = urlsplit(uri)
    if parts.scheme == "sqlite" and parts.path and not parts.path.startswith("//"):
        return f"sqlite:///{Path(parts.path[1:]).absolute()}"
    if parts.scheme == "" and uri not in _STORES_BY_NAME:
        return Path(uri).absolute().as_uri()
    if parts.scheme == "file" and not parts.path.startswith("/"):
        return Path(parts.path).absolute().as_uri()
    return uri
