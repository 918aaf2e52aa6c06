"""One readable line out of what Spark and Py4J report when a slot's job fails.

Spark's messages nest three deep (job aborted → task failed → the cause) and end with a driver stack trace. The
patterns below were taken from pyspark 3.5 to 4.3; an unknown message falls through to its first line.
"""

from __future__ import annotations

import re

_EXECUTOR_LOST = re.compile(r"ExecutorLostFailure \(executor (\S+) (.*?)\)(?: Reason: (.*))?$", re.MULTILINE)
_MODULE_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_PYTHON_VERSION = re.compile(r"PYTHON_VERSION_MISMATCH\]?.*|Python in worker has different version.*")
_PYTHON_NOT_RUN = re.compile(r'Cannot run program "([^"]*)".*')
_MOST_RECENT = re.compile(r"[Mm]ost recent failure: (?:Lost task [^:]*: )?(.*)", re.DOTALL)
_RESULT_SIZE = re.compile(
    r"(?:Total size of serialized results|serialized results of).*?spark\.driver\.maxResultSize[^\n]*"
)
TOO_BIG = "a result is too big for Spark"
_CANCELLED = re.compile(r"Job \d+ cancelled(?: part of cancelled job group \S+| because (.*)|(.*))")


def reason_of(message: str) -> str:
    """What happened, in one line of at most 500 characters; with the remedy where there is a known one.

    `message` is a Java exception's message or stack trace, or a task's error message from the status store.
    """
    message = message.strip()
    if lost := _EXECUTOR_LOST.search(message):
        executor, how, reason = lost.groups()
        return _one_line(f"executor {executor} was lost: {reason or how}")
    if missing := _MODULE_MISSING.search(message):
        return _module_missing(missing.group(1))
    if _PYTHON_VERSION.search(message):
        return (
            "the executors run another Python than the driver; set PYSPARK_PYTHON (or spark.pyspark.python) to the "
            "same minor version on both"
        )
    if program := _PYTHON_NOT_RUN.search(message):
        return (
            f"the executor has no program {program.group(1)!r}; set PYSPARK_PYTHON (or spark.pyspark.python) to a "
            "Python that exists there"
        )
    if size := _RESULT_SIZE.search(message):
        return _one_line(f"{TOO_BIG}: {size.group(0)}; raise spark.driver.maxResultSize")
    if "Python worker exited unexpectedly" in message or "EOFException" in message:
        return "the agent's Python process died (the executor's stderr log may say why)"
    if "SparkContext was shut down" in message or "stopped SparkContext" in message:
        return "the SparkContext was stopped"
    if cancelled := _CANCELLED.search(message):
        detail = next((group for group in cancelled.groups() if group), "").strip()
        return _one_line(f"the slot's job was cancelled{': ' + detail if detail else ''}")
    if "Traceback (most recent call last)" in message:
        return _one_line(f"the agent raised {_last_exception(message)}")
    if recent := _MOST_RECENT.search(message):
        return _one_line(recent.group(1))
    return _one_line(message) or "Spark gave no reason"


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
