"""Sessions of Spark Connect: find the active one, run queries that can be ended, and say why one failed.

A Connect session has no JVM and no SparkContext on this side. Queries travel to a server, each from a thread of its own
that waits for the rows. Nothing here imports `pyspark.sql.connect`, which needs gRPC, before there is a session.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import pickle
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_elastic.errors import MissingExtraError

_CLIENT_PACKAGES = {
    "grpc": "grpcio",
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
}
"""What pyspark imports for a Connect session, and the packages that have it."""
_RETRIES, _MAX_BACKOFF_MS = 150, 4000
"""As long as Spark retries a call by default, about ten minutes, but never asleep for long: a call that sleeps does not
notice that its connection was closed."""
_SESSION_GONE = re.compile(r"INVALID_HANDLE\.SESSION_\w+|SESSION_CLOSED|SESSION_NOT_FOUND|SESSION_CHANGED")
_CANCELED = "OPERATION_CANCELED"
_NO_SERVER = re.compile(r"StatusCode\.UNAVAILABLE|RETRIES_EXCEEDED|failed to connect to all addresses|closed channel")


# --- sessions ---------------------------------------------------------------------------------------


def is_connect(thing: Any) -> bool:
    """Return True for a session of Spark Connect."""
    return any(cls.__module__.startswith("pyspark.sql.connect") for cls in type(thing).__mro__)


def check_packages(what: str) -> None:
    """Raise MissingExtraError if this process lacks a package that a Connect session needs; `what` needs it."""
    for module, package in _CLIENT_PACKAGES.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ImportError:  # of the package around it
            found = False
        if not found:
            raise MissingExtraError(what=what, package=package, extra="connect")


def active_session() -> Any:
    """Return the active Connect session of this thread, else the process's default one; None without one."""
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    kind: Any = module.SparkSession
    try:
        found = kind.getActiveSession()
        return found if found is not None else kind._get_default_session()
    except Exception:  # there is none; which error that raises depends on Spark's version
        return None


def has_session() -> bool:
    """Return whether this process has a session of either kind, or a SparkContext. Starts nothing."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    return active_session() is not None or getattr(context, "_active_spark_context", None) is not None


def databricks_of(session: Any) -> str | None:
    """Return the name of the Databricks compute behind a session, whose tasks connect to no program; None elsewhere."""
    version = os.environ.get("DATABRICKS_RUNTIME_VERSION", "")
    if "DATABRICKS_ENV_VERSION" in os.environ or version.startswith("client."):
        return "serverless compute of Databricks"
    if version:
        return "a Databricks cluster with standard access mode"
    client = session.client
    try:
        metadata = client.metadata() if hasattr(client, "metadata") else client._builder.metadata()
        names = {name for name, _ in metadata}
    except Exception:  # not a public interface
        return None
    return "Databricks Connect" if names & {"x-databricks-session-id", "x-databricks-cluster-id"} else None


def server_of(session: Any) -> tuple[str, int]:
    """Return host and port of the session's server."""
    host, _, port = str(session.client._builder.endpoint).rpartition(":")
    return host.strip("[]") or "localhost", int(port)


def second_connection(session: Any) -> Any:
    """Return another client of the same session on the server, over a connection of its own.

    Closing it with `close_connection` ends the calls that wait in it, also when the server does not answer; the session
    stays open. Returns `session` itself if this version of Spark cannot do it.
    """
    try:
        builder = copy.copy(session.client._builder)
        builder._params = {**builder._params, "session_id": session.session_id}
        other = type(session)(connection=builder, userId=session.client._user_id)
        retries = importlib.import_module("pyspark.sql.connect.client.retries")
        other.client.set_retry_policies([retries.DefaultPolicy(max_retries=_RETRIES, max_backoff=_MAX_BACKOFF_MS)])
    except Exception:  # not a public interface: pyspark 3.5 has other names for its parts
        return session
    if other.session_id != session.session_id:
        other.client.close()
        return session
    return other


def close_connection(other: Any, session: Any) -> None:
    """Close what `second_connection` returned for `session`. The session on the server stays."""
    if other is not session:
        with contextlib.suppress(Exception):  # it is closed already, or was never used
            other.client.close()


# --- queries ----------------------------------------------------------------------------------------


def rows_of_tasks(session: Any, task: Callable[[Any], Any], width: int | None, barrier: bool = False) -> list[Any]:
    """Return what a function returns in the tasks of a query, as of `Cluster.start_tasks`.

    Without a width there is one task for each slot: a range is planned with as many partitions.
    """
    rows = session.range(0, 1 << 20) if width is None else session.range(0, width, 1, width)
    made = rows.mapInArrow(_in_arrow(task), "item binary", barrier=barrier)
    return [pickle.loads(row.item) for row in made.collect()]


def _in_arrow(task: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function for `mapInArrow`, which is pickled by value: each item that `task` returns is a row."""

    def arrow_task(batches: Any) -> Any:
        import pickle

        import pyarrow as pa

        for _ in batches:
            pass
        for item in task(iter(())):
            yield pa.RecordBatch.from_pydict({"item": [pickle.dumps(item)]})

    return arrow_task


# --- data for executors -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """Bytes for tasks, inside the query itself or in a file among the session's artifacts."""

    data: bytes = field(default=b"", repr=False)
    file: str = ""

    @property
    def value(self) -> bytes:
        """The bytes. To be read in a task."""
        from pyspark import SparkFiles

        return Path(SparkFiles.get(self.file)).read_bytes() if self.file else self.data


# --- reasons of failures ----------------------------------------------------------------------------


def was_interrupted(error: BaseException) -> bool:
    return _CANCELED in str(error)


def why_session_is_gone(error: BaseException) -> str | None:
    """Return in words why no query of this session will ever run again; None if the error does not say so."""
    text = str(error)
    if _SESSION_GONE.search(text):
        return "the Spark Connect server has closed the session, or was restarted; create a new session"
    if _NO_SERVER.search(text):
        return "the connection to the Spark Connect server is gone"
    return None


def server_answers(session: Any, timeout_s: float = 1.0) -> bool:
    """Return False if nothing accepts connections at the server's address."""
    try:
        address = server_of(session)
    except (AttributeError, ValueError):  # a channel of the user's own, without host and port
        return True
    try:
        with socket.create_connection(address, timeout=timeout_s):
            return True
    except OSError:
        return False
