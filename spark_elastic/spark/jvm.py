"""The calls of Spark's JVM through Py4J: settings, the connection, jobs in a thread, task slots."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.membership.reasons import counted
from spark_elastic.spark.discovery import SlotCount
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


def why_gone(sc: SparkContext) -> str | None:
    """Return why this context will never run a job again; None if it may run one."""
    from py4j.protocol import Py4JNetworkError

    try:
        return STOPPED if jvm_context(sc).isStopped() else None
    except RuntimeError as error:
        return str(error)
    except (Py4JNetworkError, ConnectionError):
        return JVM_GONE


def close_connection(context: Any) -> None:
    """Close this thread's connection to the JVM. To be called before the thread ends.

    Otherwise Py4J closes it from a finalizer after the thread's end, and the log call in there leaves a stale entry
    behind in `threading.enumerate()`.
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


@dataclass(eq=False)
class BackgroundJob:
    """A Spark job in its own thread and job group. Starts at once.

    It inherits the local properties of the thread that makes it, such as its scheduler pool.
    """

    sc: SparkContext
    width: int
    """The number of tasks."""
    task: Callable[[Any], Any]
    """Called in each task with an iterator that has the task's number; returns rows. Pickled by cloudpickle."""
    description: str
    """The job's name in Spark's UI."""
    barrier: bool = False
    """True: all tasks start together, or none does."""

    def __post_init__(self) -> None:
        self._group = f"spark_elastic-{uuid.uuid4().hex[:12]}"
        self._properties: Any = jvm_context(self.sc).getLocalProperties().clone()
        self._cancelled = False
        self.rows: list[Any] = []
        """The rows of all tasks; empty until all have ended."""
        self.error: BaseException | None = None
        """The reason why the job failed; None if it did not, or was cancelled here."""
        self.over = threading.Event()
        threading.Thread(target=self._run, name="spark_elastic job", daemon=True).start()

    def cancel(self, timeout_s: float) -> None:
        """End the job, also if it is not submitted yet, and wait up to `timeout_s` until it is over.

        Closes the calling thread's connection to the JVM.
        """
        self._cancelled = True
        until = clock.monotonic() + timeout_s
        with contextlib.suppress(Exception):  # Spark is gone, and the job with it
            while not self.over.is_set() and clock.monotonic() < until:
                jvm_context(self.sc).cancelJobGroup(self._group)
                self.over.wait(0.1)
        close_connection(self.sc)

    def _run(self) -> None:
        try:
            jvm_context(self.sc).setLocalProperties(self._properties.clone())
            self.sc.setJobGroup(self._group, self.description)
            rdd: Any = self.sc.parallelize(range(self.width), self.width)
            rows = (rdd.barrier() if self.barrier else rdd).mapPartitions(self.task)
            if not self._cancelled:
                self.rows = rows.collect()
        except Exception as error:
            if not self._cancelled:
                self.error = error
        finally:
            close_connection(self.sc)
            self.over.set()


# --- slots --------------------------------------------------------------------------------------

_UNBOUNDED = 2**31 - 1


def count_slots(sc: SparkContext) -> SlotCount:
    """Count the task slots, now and at most. Asks the scheduler, which takes milliseconds; runs no job."""
    context = jvm_context(sc)
    now = slots_now(context)
    executors = int(context.getExecutorIds().size()) if not is_local(sc) else 1
    cpus = setting_of(sc, "spark.task.cpus", "1")
    where = f"{counted(executors, 'executor')} with {now} slots in all (spark.task.cpus={cpus})"
    if not dynamic_allocation(sc):
        return SlotCount(now, now, where)
    most_executors = int(setting_of(sc, "spark.dynamicAllocation.maxExecutors") or _UNBOUNDED)
    if most_executors >= _UNBOUNDED:
        return SlotCount(now, None, where)
    profile = context.resourceProfileManager().defaultResourceProfile()
    per_executor = int(profile.maxTasksPerExecutor(context.conf()))
    return SlotCount(now, max(most_executors * per_executor, now), where)


def fixed_slots(sc: SparkContext) -> int | None:
    """Return the number of slots that can never be exceeded (local mode, `local-cluster`); None if not known."""
    if is_local(sc):
        return slots_now(jvm_context(sc))
    sizes = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", sc.master)
    if sizes is None or dynamic_allocation(sc):
        return None
    cores = int(sizes[2]) // int(jvm_context(sc).conf().get("spark.task.cpus", "1"))
    return max(int(sizes[1]) * cores, slots_now(jvm_context(sc)))


def slots_now(context: Any) -> int:
    """Return the slots of all active executors: without those that are lost, removed or decommissioned."""
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def executor_ids(sc: SparkContext) -> list[str]:
    """Return the registered executors. Not for local mode, where Spark logs a warning at each call."""
    return str(jvm_context(sc).getExecutorIds().mkString("\n")).split()  # one call, not one for each


def running_tasks(sc: SparkContext) -> int:
    """Return how many tasks of the application run now."""
    counts = str(jvm_context(sc).taskScheduler().runningTasksByExecutors().values().mkString(" "))
    return sum(map(int, counts.split()))


def is_local(sc: SparkContext) -> bool:
    """Return True if tasks run inside the driver's own JVM (`local[N]`, but not `local-cluster`)."""
    return bool(jvm_context(sc).isLocal())


def dynamic_allocation(sc: SparkContext) -> bool:
    return setting_of(sc, "spark.dynamicAllocation.enabled") == "true" and not is_local(sc)
