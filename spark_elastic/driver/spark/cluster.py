"""How many tasks Spark can run at once, and where."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.wording import loss_in_words

if TYPE_CHECKING:
    from pyspark import SparkContext

# One readable line out of what Spark and Py4J report when a slot's job fails.
#
# Spark's messages nest three deep (job aborted → task failed → the cause) and end with a driver stack trace. The
# patterns below were taken from pyspark 3.5 to 4.3; an unknown message falls through to its first line.

_EXECUTOR_LOST = re.compile(r"ExecutorLostFailure \(executor (\S+) (.*?)\)(?: Reason: (.*))?$", re.MULTILINE)
_MODULE_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_PYTHON_VERSION = re.compile(r"PYTHON_VERSION_MISMATCH\]?.*|Python in worker has different version.*")
_PYTHON_NOT_RUN = re.compile(r'Cannot run program "([^"]*)".*')
_MOST_RECENT = re.compile(r"[Mm]ost recent failure: (?:Lost task [^:]*: )?(.*)", re.DOTALL)
_RESULT_SIZE = re.compile(
    r"(?:Total size of serialized results|serialized results of).*?spark\.driver\.maxResultSize[^\n]*"
)
_EXIT_CODE = re.compile(r"(?:[Ee]xited with(?: code)?|exit code|Exit status:?) ?(-?\d+)")
_SYMPTOM = re.compile(r"connection|channel|[Ww]orker lost|unreachable")
"""Words of Spark's that tell how a loss was noticed; the cause often arrives a moment later."""
_CANCELLED = re.compile(r"Job \d+ cancelled(?: part of cancelled job group \S+| because (.*)|(.*))")


def loss_of(message: str) -> LossCause:
    """Return what happened, in words of at most 500 characters; with the remedy where there is a known one.

    Args:
        message: a Java exception's message or stack trace, or a task's error message from the status store.
    """
    message = message.strip()
    if lost := _EXECUTOR_LOST.search(message):
        executor, how, reason = lost.groups()
        return LossCause(LossKind.EXECUTOR_LOST, name=executor, because=loss_of_executor(reason or how))
    if missing := _MODULE_MISSING.search(message):
        return reported(_module_missing(missing.group(1)))
    if _PYTHON_VERSION.search(message):
        return reported(
            "the executors run another Python than the driver; set PYSPARK_PYTHON (or spark.pyspark.python) to the "
            "same minor version on both"
        )
    if program := _PYTHON_NOT_RUN.search(message):
        return reported(
            f"the executor has no program {program.group(1)!r}; set PYSPARK_PYTHON (or spark.pyspark.python) to a "
            "Python that exists there"
        )
    if size := _RESULT_SIZE.search(message):
        words = f"a result is too big for Spark: {size.group(0)}; raise spark.driver.maxResultSize"
        return LossCause(LossKind.RESULT_TOO_BIG, detail=_one_line(words))
    if "Python worker exited unexpectedly" in message or "EOFException" in message:
        return _unexplained("the agent's Python process died (the executor's stderr log may say why)")
    if "SparkContext was shut down" in message or "stopped SparkContext" in message:
        return reported("the SparkContext was stopped")
    if cancelled := _CANCELLED.search(message):
        detail = next((group for group in cancelled.groups() if group), "").strip()
        return reported(_one_line(f"the slot's job was cancelled{': ' + detail if detail else ''}"))
    if "Traceback (most recent call last)" in message:
        return reported(_one_line(f"the agent raised {_last_exception(message)}"))
    if recent := _MOST_RECENT.search(message):
        return reported(_one_line(recent.group(1)))
    return reported(_one_line(message) or "Spark gave no reason")


def loss_of_executor(message: str) -> LossCause:
    """Return what Spark's words about a lost executor mean: an exit code, a mere symptom, or neither."""
    line = _one_line(message)
    if exited := _EXIT_CODE.search(line):
        return LossCause(LossKind.EXITED, code=int(exited.group(1)), detail=line)
    return _unexplained(line) if _SYMPTOM.search(line) else reported(line)


def _unexplained(words: str) -> LossCause:
    return LossCause(LossKind.UNEXPLAINED, detail=words)


def _module_missing(module: str) -> str:
    package = module.partition(".")[0]
    if package == "spark_elastic":
        return (
            "the executors cannot import spark_elastic: install it into the Python that they run "
            "(spark.pyspark.python), or ship it with sc.addPyFile or spark.submit.pyFiles"
        )
    return f"the executors cannot import {module}: install it into the Python that they run (spark.pyspark.python)"


def _last_exception(message: str) -> str:
    """The exception that the last Python traceback ends with: the first line after it that is not indented."""
    lines = message.rpartition("Traceback (most recent call last)")[2].splitlines()
    for line in lines[1:]:
        if line.strip() and not line[0].isspace():
            name, colon, text = line.partition(": ")
            return f"{name.rpartition('.')[2]}{colon}{text}"
    return "an exception"


def _one_line(text: str) -> str:
    line = text.strip().splitlines()[0].strip() if text.strip() else ""
    return line if len(line) <= 500 else line[:497] + "..."


# The driver's dealings with Spark's JVM through Py4J, where they need care.


def loss_of_error(error: Exception) -> LossCause:
    """Return what an exception of Py4J or PySpark means."""
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    if isinstance(error, Py4JJavaError):
        try:
            return loss_of(str(error.java_exception.getMessage()))
        except Exception:
            return _unexplained("the connection to Spark's JVM is gone")
    if isinstance(error, (Py4JNetworkError, ConnectionError)):
        return _unexplained("the connection to Spark's JVM is gone")
    if isinstance(error, (Py4JError, PySparkException)):
        return loss_of(str(error))
    return reported(f"{type(error).__name__}: {loss_in_words(loss_of(str(error)))}")


def reason_of_error(error: Exception) -> str:
    """Return what an exception of Py4J or PySpark means, in words."""
    return loss_in_words(loss_of_error(error))


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


_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Task slots of an application."""

    now: int
    """With the executors registered at this moment, busy or not; cores, spark.task.cpus and GPUs considered."""
    most: int | None
    """What dynamic allocation may grow to; the same as `now` without it; None: no bound is set."""
    executors: int
    """Executors registered now; 1 in local mode."""


def count_slots(sc: SparkContext) -> SlotCount:
    """Some milliseconds; nothing is run."""
    context = jvm_context(sc)
    profile = context.resourceProfileManager().defaultResourceProfile()
    now = int(context.maxNumConcurrentTasks(profile))
    executors = len(executor_ids(sc)) if not is_local(sc) else 1
    if not dynamic_allocation(sc):
        return SlotCount(now, now, executors)
    most_executors = int(sc.getConf().get("spark.dynamicAllocation.maxExecutors", str(_UNBOUNDED)) or _UNBOUNDED)
    if most_executors >= _UNBOUNDED:
        return SlotCount(now, None, executors)
    per_executor = int(profile.maxTasksPerExecutor(context.conf()))
    return SlotCount(now, max(most_executors * per_executor, now), executors)


def most_slots(sc: SparkContext) -> int | None:
    """How many slots there can ever be where that is fixed: in local mode and on `local-cluster`. None: not known."""
    context = jvm_context(sc)
    if is_local(sc):
        return count_slots(sc).now
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", sc.master)
    if cluster is None or dynamic_allocation(sc):
        return None
    cores = int(cluster[2]) // int(context.conf().get("spark.task.cpus", "1"))
    return max(int(cluster[1]) * cores, count_slots(sc).now)


def hosts_and_slots(sc: SparkContext) -> dict[str, int]:
    """Slots by host, in Spark's order, without executors that are excluded or on their way out."""
    context = jvm_context(sc)
    if is_local(sc):
        return {"127.0.0.1": count_slots(sc).now}
    per_executor = int(context.resourceProfileManager().defaultResourceProfile().maxTasksPerExecutor(context.conf()))
    backend = context.schedulerBackend()
    summaries = context.statusStore().executorList(True)
    found: dict[str, int] = {}
    for index in range(summaries.size()):
        summary = summaries.apply(index)
        executor = str(summary.id())
        if executor == "driver" or summary.isExcluded() or not backend.isExecutorActive(executor):
            continue
        host = str(summary.hostPort() or "").rpartition(":")[0]
        if not host:  # registered this moment; its block manager, which brings the address, has not
            continue
        # maxTasks knows the cores that the executor really has; the profile knows its GPUs.
        found[host] = found.get(host, 0) + min(int(summary.maxTasks()), max(per_executor, 1))
    return found


def executor_ids(sc: SparkContext) -> list[str]:
    """Registered executors. Not for local mode, where Spark would log a warning at each call."""
    ids = jvm_context(sc).getExecutorIds()
    return [str(ids.apply(index)) for index in range(ids.size())]


def is_local(sc: SparkContext) -> bool:
    """Whether tasks run inside the driver's own JVM (`local[N]`, not `local-cluster`)."""
    return bool(jvm_context(sc).isLocal())


def dynamic_allocation(sc: SparkContext) -> bool:
    return sc.getConf().get("spark.dynamicAllocation.enabled", "false") == "true" and not is_local(sc)
