"""The calls of Spark's JVM through Py4J: settings, the connection, task slots.

Some platforms let Python call listed methods of the JVM alone. What has another way is done that way (`if_allowed`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.spark.failures import JVM_GONE, STOPPED, refused_call

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

T = TypeVar("T")


def if_allowed(call: Callable[[], T], otherwise: T) -> T:
    """Return what a call of the JVM returns; `otherwise` if the platform does not allow it."""
    try:
        return call()
    except Exception as error:
        if refused_call(error) is None:
            raise
        log.debug("%s is not allowed here", refused_call(error))
        return otherwise


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
        return reported(STOPPED) if if_allowed(jvm_context(sc).isStopped, False) else None
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


_profiles: dict[tuple[Any, ...], Any] = {}
"""By application and resources: Spark forgets none, and dynamic allocation starts executors for each."""


def task_profile(sc: SparkContext, resources: Mapping[str, float], dynamic: bool) -> Any:
    """Return the profile of tasks with these resources ("cpus", "gpu"); raise Spark's error if it refuses them.

    Under dynamic allocation its executors have what the session's settings say of those resources.
    """
    known = (sc.applicationId, *sorted(resources.items()))
    if known in _profiles:
        return _profiles[known]
    from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

    tasks, executors = TaskResourceRequests(), ExecutorResourceRequests()
    for name, amount in resources.items():
        if name == "cpus":
            tasks.cpus(int(amount))
            continue
        tasks.resource(name, amount)
        asked = [
            setting_of(sc, f"spark.executor.resource.{name}.{each}") for each in ("amount", "discoveryScript", "vendor")
        ]
        executors.resource(name, int(asked[0] or 0), asked[1] or "", asked[2] or "")
    builder = ResourceProfileBuilder().require(tasks)
    profile = (builder.require(executors) if dynamic else builder).build
    jvm_context(sc).resourceProfileManager().addResourceProfile(profile._java_resource_profile)
    return _profiles.setdefault(known, profile)


def slots_now(sc: SparkContext, profile: Any = None) -> int | None:
    """Return the slots of all active executors: without those that are lost, removed or decommissioned.

    `profile`: that of the tasks; None: the session's. Where the scheduler may not be asked, by the executors' cores;
    None if their number is hidden by a setting.
    """
    context = jvm_context(sc)
    slots = if_allowed(lambda: int(context.maxNumConcurrentTasks(java_profile(context, profile))), None)
    if slots is not None or setting_of(sc, "spark.default.parallelism") is not None:
        return slots
    cores = if_allowed(lambda: int(context.defaultParallelism()), None)
    return None if cores is None else cores // int(setting_of(sc, "spark.task.cpus", "1") or 1)


def java_profile(context: Any, profile: Any) -> Any:
    """Return a profile as the JVM has it; of None, the session's."""
    manager = context.resourceProfileManager()
    return manager.defaultResourceProfile() if profile is None else profile._java_resource_profile


def executor_ids(sc: SparkContext) -> list[str] | None:
    """Return the registered executors; None if they may not be asked for.

    Not for local mode, where Spark logs a warning at each call.
    """
    ids = if_allowed(lambda: str(jvm_context(sc).getExecutorIds().mkString("\n")), None)  # one call, not one for each
    return None if ids is None else ids.split()
