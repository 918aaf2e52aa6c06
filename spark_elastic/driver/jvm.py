"""The driver's dealings with Spark's JVM through Py4J, where they need care."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any

from spark_elastic.driver.spark_reasons import reason_of

if TYPE_CHECKING:
    from pyspark import SparkContext


def reason_of_error(error: Exception) -> str:
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    if isinstance(error, Py4JJavaError):
        try:
            return reason_of(str(error.java_exception.getMessage()))
        except Exception:
            return "the connection to Spark's JVM is gone"
    if isinstance(error, (Py4JNetworkError, ConnectionError)):
        return "the connection to Spark's JVM is gone"
    if isinstance(error, (Py4JError, PySparkException)):
        return reason_of(str(error))
    return f"{type(error).__name__}: {reason_of(str(error))}"


def is_drivers_own(error: Exception) -> bool:
    """Whether a job failed in the driver, before any executor had a part in it: a full disk, no descriptors."""
    from py4j.protocol import Py4JJavaError

    if isinstance(error, Py4JJavaError):
        try:
            return "Task serialization failed" in str(error.java_exception.getMessage())
        except Exception:
            return False  # its JVM is gone
    return isinstance(error, (OSError, pickle.PicklingError)) and not isinstance(error, ConnectionError)


def close_connection(sc: SparkContext) -> None:
    """Close this thread's connection to the JVM; to be called before the thread ends.

    Py4J would do it from a finalizer after the thread's end, where its log call leaves a stale entry behind in
    `threading.enumerate()`.
    """
    client: Any = getattr(sc._gateway, "_gateway_client", None)
    connection = client.get_thread_connection() if hasattr(client, "get_thread_connection") else None
    if connection is None:
        return
    with contextlib.suppress(ValueError):
        client.deque.remove(connection)
    with contextlib.suppress(Exception):
        connection.close()


def jvm_context(sc: SparkContext) -> Any:
    """The Scala SparkContext.

    Raises:
        RuntimeError: after `sc.stop()`.
    """
    java_context = sc._jsc
    if java_context is None:
        raise RuntimeError("the SparkContext was stopped")
    return java_context.sc()


def why_gone(sc: SparkContext) -> str | None:
    """Why this context will never run anything again; None: it may."""
    from py4j.protocol import Py4JNetworkError

    try:
        return "the SparkContext was stopped" if jvm_context(sc).isStopped() else None
    except RuntimeError as error:
        return str(error)
    except (Py4JNetworkError, ConnectionError):
        return "the connection to Spark's JVM is gone"
