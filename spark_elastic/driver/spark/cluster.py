"""The calls of Spark's JVM through Py4J: reasons of failed jobs, the connection, jobs in a thread, task slots."""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.data.spark_connect import setting_of
from spark_elastic.data.spark_console import close_connection
from spark_elastic.errors import PYTHON_SETTING
from spark_elastic.membership.reasons import LossCause, LossKind, loss_in_words, reported

if TYPE_CHECKING:
    from pyspark import SparkContext

STOPPED = "the SparkContext was stopped"
_JVM_GONE = "the connection to Spark's JVM is gone"

# --- why a job failed ---------------------------------------------------------------------------

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
"""Words in which Spark says how it noticed a loss. The cause often arrives a moment later."""
_CANCELLED = re.compile(r"Job \d+ cancelled(?: part of cancelled job group \S+| because (.*)|(.*))")


def loss_of(message: str) -> LossCause:
    """Return the cause of a failure that Spark reports, with the remedy where one is known.

    The message is a Java exception's, with its stack trace, or a task's from Spark's status store. Spark nests messages
    three deep (job aborted → task failed → cause). The patterns above were taken from pyspark 3.5 to 4.3; of an unknown
    message the first line is kept, at most 500 characters of it.
    """
    message = message.strip()
    if lost := _EXECUTOR_LOST.search(message):
        executor, how, reason = lost.groups()
        return LossCause(LossKind.EXECUTOR_LOST, name=executor, because=loss_of_executor(reason or how))
    if missing := _MODULE_MISSING.search(message):
        return reported(_module_missing(missing.group(1)))
    if _PYTHON_VERSION.search(message):
        return reported(
            f"the executors run another Python than the driver; before the session starts, set {PYTHON_SETTING} to a "
            "Python of the same minor version"
        )
    if program := _PYTHON_NOT_RUN.search(message):
        return reported(
            f"the executor has no program {program.group(1)!r}; before the session starts, set {PYTHON_SETTING} to a "
            "Python that exists there"
        )
    if size := _RESULT_SIZE.search(message):
        words = f"a result is too big for Spark: {size.group(0)}; raise spark.driver.maxResultSize"
        return LossCause(LossKind.RESULT_TOO_BIG, detail=_one_line(words))
    if "Python worker exited unexpectedly" in message or "EOFException" in message:
        return _unexplained("the agent's Python process died (the executor's stderr log may say why)")
    if "SparkContext was shut down" in message or "stopped SparkContext" in message:
        return reported(STOPPED)
    if cancelled := _CANCELLED.search(message):
        detail = next((group for group in cancelled.groups() if group), "").strip()
        words = _one_line(f"the slot's job was cancelled{': ' + detail if detail else ''}")
        return LossCause(LossKind.CANCELLED, detail=words)
    if "Traceback (most recent call last)" in message:
        return reported(_one_line(f"the agent raised {_last_exception(message)}"))
    if recent := _MOST_RECENT.search(message):
        return reported(_one_line(recent.group(1)))
    return reported(_one_line(message) or "Spark gave no reason")


def loss_of_executor(message: str) -> LossCause:
    """Return the cause in Spark's message about a lost executor: an exit code, a symptom, or the message."""
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
            "(PYSPARK_PYTHON), or ship it with sc.addPyFile or spark.submit.pyFiles"
        )
    return f"the executors cannot import {module}: install it into the Python that they run (PYSPARK_PYTHON)"


def _last_exception(message: str) -> str:
    """Return the exception of the last Python traceback: the first line below it that is not indented."""
    lines = message.rpartition("Traceback (most recent call last)")[2].splitlines()
    for line in lines[1:]:
        if line.strip() and not line[0].isspace():
            name, colon, text = line.partition(": ")
            return f"{name.rpartition('.')[2]}{colon}{text}"
    return "an exception"


def _one_line(text: str) -> str:
    line = text.strip().splitlines()[0].strip() if text.strip() else ""
    return line if len(line) <= 500 else line[:497] + "..."


def loss_of_error(error: Exception) -> LossCause:
    """Return why a call of Spark failed."""
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    if isinstance(error, Py4JJavaError):
        message = _java_message(error)
        return _unexplained(_JVM_GONE) if message is None else loss_of(message)
    if isinstance(error, (Py4JNetworkError, ConnectionError)):
        return _unexplained(_JVM_GONE)
    if isinstance(error, (Py4JError, PySparkException)):
        return loss_of(str(error))
    return reported(f"{type(error).__name__}: {loss_in_words(loss_of(str(error)))}")


def loss_of_gone(why: str) -> LossCause:
    """Return the cause of a loss from `why_gone`'s answer."""
    return _unexplained(why) if why == _JVM_GONE else reported(why)


def reason_of_error(error: Exception) -> str:
    """Return why a call of Spark failed, in words."""
    return loss_in_words(loss_of_error(error))


def failed_in_driver(error: Exception) -> bool:
    """Return True if a job failed in the driver before any executor was involved: a full disk, no descriptors."""
    if "Task serialization failed" in (_java_message(error) or ""):
        return True
    return isinstance(error, (OSError, pickle.PicklingError)) and not isinstance(error, ConnectionError)


def _java_message(error: Exception) -> str | None:
    """Return the message of a Java exception; None if `error` is not one, or if its JVM is gone."""
    from py4j.protocol import Py4JError, Py4JJavaError

    if not isinstance(error, Py4JJavaError):
        return None
    try:
        cause = error.java_exception
        if cause.getClass().getSimpleName() == "ExecutionException":  # of a future: it only says that there is a cause
            cause = cause.getCause() or cause
        return str(cause.getMessage())
    except (Py4JError, OSError):  # the message is in the JVM; Py4J raises either, depending on how the JVM went
        return None


# --- the connection to the JVM ------------------------------------------------------------------


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
        return _JVM_GONE


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
        self.error: Exception | None = None
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


@dataclass(frozen=True, slots=True)
class SlotCount:
    """The task slots of an application."""

    now: int
    """Slots of the executors that are registered now, busy or not; limited by cores, spark.task.cpus and GPUs."""
    most: int | None
    """Slots that the application may have; `now` without dynamic allocation; None if that has no limit."""
    executors: int
    """Executors that are registered now; 1 in local mode."""


def count_slots(sc: SparkContext) -> SlotCount:
    """Count the task slots, now and at most. Asks the scheduler, which takes milliseconds; runs no job."""
    context = jvm_context(sc)
    now = slots_now(context)
    executors = int(context.getExecutorIds().size()) if not is_local(sc) else 1
    if not dynamic_allocation(sc):
        return SlotCount(now, now, executors)
    most_executors = int(setting_of(sc, "spark.dynamicAllocation.maxExecutors") or _UNBOUNDED)
    if most_executors >= _UNBOUNDED:
        return SlotCount(now, None, executors)
    profile = context.resourceProfileManager().defaultResourceProfile()
    per_executor = int(profile.maxTasksPerExecutor(context.conf()))
    return SlotCount(now, max(most_executors * per_executor, now), executors)


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
