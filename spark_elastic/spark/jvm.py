"""The calls of Spark's JVM through Py4J: settings, the connection, task slots."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.spark.failures import JVM_GONE, STOPPED

if TYPE_CHECKING:
    from pyspark import SparkContext

# --- settings and the connection to the JVM ------------------------------------------------------------------


def setting_of(sc: SparkContext, name: str, default: str | None = None) -> str | None:
    """Return a setting of a SparkContext."""
    # getConf() would copy all settings from the JVM, with some calls for each
    value: str | None = sc._conf.get(name, default)
    return value


def is_local_master(master: str) -> bool:
    """Return True if Spark's tasks run on this machine, in the driver's own JVM."""
    return master == "local" or master.startswith("local[")


def jvm_context(sc: SparkContext) -> Any:
    """Return the Scala SparkContext. Raise RuntimeError if `sc` was stopped."""
    java_context = sc._jsc
    if java_context is None:
        raise RuntimeError(STOPPED)
    return java_context.sc()


def why_gone(sc: SparkContext) -> LossCause | None:
    """Return why this context will never run a job again; None if it may run one."""
    from py4j.protocol import Py4JNetworkError

    try:
        return reported(STOPPED) if jvm_context(sc).isStopped() else None
    except RuntimeError as error:
        return reported(str(error))
    except (Py4JNetworkError, ConnectionError):
        return LossCause(LossKind.UNEXPLAINED, detail=JVM_GONE)


def close_connection(context: Any) -> None:
    """Close this thread's connection to the JVM, before the thread ends.

    Py4J's finalizer would do so after its end, and leave a stale entry behind in `threading.enumerate()`.
    """
    from py4j.protocol import Py4JError

    client: Any = getattr(context._gateway, "_gateway_client", None)
    connection = client.get_thread_connection() if hasattr(client, "get_thread_connection") else None
    if connection is None:
        return
    with contextlib.suppress(ValueError):
        client.deque.remove(connection)
    with contextlib.suppress(Py4JError, OSError):  # the JVM has closed it already
        connection.close()


# --- slots --------------------------------------------------------------------------------------


def slots_now(context: Any) -> int:
    """Return the slots of all active executors: without those that are lost, removed or decommissioned."""
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def executor_ids(sc: SparkContext) -> list[str]:
    """Return the registered executors. Not for local mode, where Spark logs a warning at each call."""
    return str(jvm_context(sc).getExecutorIds().mkString("\n")).split()  # one call, not one for each
