"""Why a Spark job failed, in a sentence: the cause at the bottom, without the JVM's frames and the task's history."""

from __future__ import annotations

import re

from spark_elastic.errors import DataError, SparkElasticError, StoreError

_RAISED = re.compile(r"^([A-Za-z_][\w.]*): ?(.*(?:\n(?![\s]*at |\s*$|Traceback|Driver stacktrace).*)*)", re.MULTILINE)
_STORAGE = ("OSError", "PermissionError", "FileNotFoundError", "StoreError", "ArrowIOError", "NotADirectoryError")


def reason_of(error: BaseException) -> tuple[type[SparkElasticError], str]:
    """What to raise, and its words.

    A StoreError if a task could not write, otherwise a DataError: the query, or the cluster, failed.
    """
    text = _text(error)
    _, found, tail = text.rpartition("Traceback (most recent call last):")
    if found:
        raised = _RAISED.search(tail)
        if raised:
            name = raised.group(1).rpartition(".")[2]
            words = raised.group(2).strip()
            in_writer = "spark_elastic/data/" in tail[: raised.start()]
            kind = StoreError if name in _STORAGE and in_writer else DataError
            return kind, words if name == "StoreError" else f"{name}: {words}"
    return DataError, _root_of_java(error) or text.strip().splitlines()[0]


_LOST_ORDER = re.compile(r"indeterminate (?:output|results|stage|rollback)|cannot rollback ", re.IGNORECASE)
"""Of what Spark says where it cannot do a part of a query again alone: the order of its rows would be another one."""


def has_lost_its_order(error: BaseException) -> bool:
    """Return whether a job failed because Spark lost shuffled rows whose order is not fixed: it can be run again."""
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
