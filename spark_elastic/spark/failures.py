"""Why Spark's jobs failed: the cause of a slot's loss, and the reason of a failed query, from Spark's messages."""

from __future__ import annotations

import pickle
import re

from spark_elastic.errors import PYTHON_SETTING, DataError, SparkElasticError, StoreError
from spark_elastic.membership.reasons import LossCause, LossKind, loss_in_words, reported

STOPPED = "the SparkContext was stopped"
JVM_GONE = "the connection to Spark's JVM is gone"

# --- why a slot's job failed --------------------------------------------------------------------

_EXECUTOR_LOST = re.compile(r"ExecutorLostFailure \(executor (\S+) (.*?)\)(?: Reason: (.*))?$", re.MULTILINE)
_MODULE_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_PYTHON_VERSION = re.compile(r"PYTHON_VERSION_MISMATCH\]?.*|Python in worker has different version.*")
_PYTHON_NOT_RUN = re.compile(r'Cannot run program "([^"]*)".*')
_MOST_RECENT = re.compile(r"[Mm]ost recent failure: (?:Lost task [^:]*: )?(.*)", re.DOTALL)
_RESULT_SIZE = re.compile(
    r"(?:Total size of serialized results|serialized results of).*?spark\.driver\.maxResultSize[^\n]*"
)
_EXIT_CODE = re.compile(r"(?:[Ee]xited with(?: code)?|exit code|Exit status:?) ?(-?\d+)")
_REFUSED = re.compile(r"Py4JSecurityException: (?:Method|Constructor) (?:.*?\s)?([\w.$]+)\(.*is not \w+listed")
_SYMPTOM = re.compile(r"connection|channel|[Ww]orker lost|unreachable")
"""Words in which Spark says how it noticed a loss. The cause often arrives a moment later."""
_CANCELLED = re.compile(r"Job \d+ cancelled(?: part of cancelled job group \S+| because (.*)|(.*))")


def refused_call(error: BaseException | str) -> str | None:
    """Return the method of the JVM that a platform's list of allowed calls lacks; None if the error is another one."""
    found = _REFUSED.search(str(error))
    return None if found is None else found[1]


def not_allowed(method: str) -> str:
    """Return the sentence about a method that no job can do without, and that the platform does not allow."""
    return (
        f"this platform does not allow Python to call {method} of Spark (a list of py4j); run on a cluster without "
        "such a list, on Databricks with dedicated access mode"
    )


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
        send = ", or ship it with sc.addPyFile or spark.submit.pyFiles"
        name, ours = missing.group(1), missing.group(1).partition(".")[0] == "spark_elastic"
        return reported(
            f"the executors cannot import {'spark_elastic' if ours else name}: install it into the Python that they "
            f"run (PYSPARK_PYTHON){send if ours else ''}"
        )
    if method := refused_call(message):
        return reported(not_allowed(method))
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


def loss_of_error(error: BaseException) -> LossCause:
    """Return why a call of Spark failed."""
    from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
    from pyspark.errors import PySparkException

    if isinstance(error, Py4JJavaError):
        message = _java_message(error)
        return _unexplained(JVM_GONE) if message is None else loss_of(message)
    if isinstance(error, (Py4JNetworkError, ConnectionError)):
        return _unexplained(JVM_GONE)
    if isinstance(error, (Py4JError, PySparkException)):
        return loss_of(str(error))
    return reported(f"{type(error).__name__}: {loss_in_words(loss_of(str(error)))}")


def failed_in_driver(error: Exception) -> bool:
    """Return True if a job failed in the driver before any executor was involved: a full disk, no descriptors."""
    if "Task serialization failed" in (_java_message(error) or "") or refused_call(error) is not None:
        return True
    return isinstance(error, (OSError, pickle.PicklingError)) and not isinstance(error, ConnectionError)


def _java_message(error: BaseException) -> str | None:
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


# --- why a query failed ---------------------------------------------------------------------------

_RAISED = re.compile(r"^([A-Za-z_][\w.]*): ?(.*(?:\n(?![\s]*at |\s*$|Traceback|Driver stacktrace).*)*)", re.MULTILINE)
_PYTHON_DIED = "Python worker exited unexpectedly"
"""Spark's words; the cause that it gives is an EOFException."""
_STORAGE = ("OSError", "PermissionError", "FileNotFoundError", "StoreError", "ArrowIOError", "NotADirectoryError")


def reason_of(error: BaseException) -> tuple[type[SparkElasticError], str]:
    """Return the error to raise for a failed Spark job, and its reason in a sentence without the JVM's frames.

    It is a StoreError if a task could not write, otherwise a DataError: the query, or the cluster, failed.
    """
    text = _text(error)
    _, found, tail = text.rpartition("Traceback (most recent call last):")
    if found and (raised := _RAISED.search(tail)):
        name, words = raised[1].rpartition(".")[2], raised[2].strip()
        in_writer = "spark_elastic/data/" in tail[: raised.start()]
        kind = StoreError if name in _STORAGE and in_writer else DataError
        return kind, words if name == "StoreError" else f"{name}: {words}"
    if _PYTHON_DIED in text:
        return DataError, (
            "a Python process of Spark ended in the middle of its rows. Either it was killed, most often because the "
            "machine or the container had no memory left (spark.executor.memoryOverhead, "
            "spark.executor.pyspark.memory), or a function of the query ended it"
        )
    return DataError, _root_of_java(error) or text.strip().splitlines()[0]


_LOST_ORDER = re.compile(r"indeterminate (?:output|results|stage|rollback)|cannot rollback ", re.IGNORECASE)
"""Spark's words if it cannot recompute a part of a query, because its rows would come in another order."""


def has_lost_its_order(error: BaseException) -> bool:
    """Return whether a job failed because Spark lost shuffled rows of no fixed order. It can be repeated."""
    return _LOST_ORDER.search(f"{_text(error)}\n{error}\n{_root_of_java(error)}") is not None


def _text(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    return str(java.toString()) if java is not None else str(error)


def _root_of_java(error: BaseException) -> str:
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        return ""
    while java.getCause() is not None:
        java = java.getCause()
    return str(java.toString()).splitlines()[0]
