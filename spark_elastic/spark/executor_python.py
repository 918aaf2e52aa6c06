"""The Python that Spark's executors run: chosen in local mode, and checked before the first job.

PySpark starts the `PYSPARK_PYTHON` of the driver's environment, or else the `python3` that comes first in PATH: another
Python than this program's where a virtual environment is used without being activated. It does not read
`spark.pyspark.python`; spark-submit does, and sets the variable for the program it starts.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from spark_elastic.errors import ExecutorPythonError

NEEDED = ("cloudpickle", "numpy", "torch", "spark_elastic")
"""Packages that a worker of any job imports."""
NEEDED_FOR_ROWS = ("pyarrow", *NEEDED)
"""The same of tasks that read or return rows."""
NEEDED_ON_CONNECT = ("pandas", *NEEDED_FOR_ROWS)
"""The same behind Spark Connect, whose tasks exchange Arrow batches."""
ON_CONNECT = "the Python that the PYSPARK_PYTHON of Spark Connect's server names, else its python3"
"""The executors' Python behind a Connect session, where no task could say its path."""
PATIENCE_S = 20.0
"""How long to wait for a task that looks at an executor, where other jobs may have all slots."""
_DEFAULT = "python3"
_VERSION_DIFFERS = re.compile(r"PYTHON_VERSION_MISMATCH|Python in worker has different version")
_NOT_RUN = re.compile(r'Cannot run program "([^"]*)"')
_NOT_STARTED = "Error from python worker"
_NO_ARROW = re.compile(r"No module named '(pandas|pyarrow)'|((?:PyArrow|Pandas) >= \S+) must be installed")


def choose_python(context: Any) -> bool:
    """Have the Python workers of a local master run this program's Python, unless the user chose one.

    The context knows what the executors run: a variable that was set after it was made has no effect. Returns whether
    the workers run this program's Python.
    """
    if context.pythonExec == _DEFAULT != os.environ.get("PYSPARK_PYTHON"):
        if sys.executable and not _is_this_python(shutil.which(_DEFAULT)):
            context.pythonExec = sys.executable
        return True
    return _is_this_python(shutil.which(context.pythonExec))


def _is_this_python(program: str | None) -> bool:
    if program is None:
        return False
    # The folder decides as well: the Python of a virtual environment is a link to the one that made it.
    same_folder = os.path.dirname(os.path.abspath(program)) == os.path.dirname(sys.executable)
    return same_folder and os.path.realpath(program) == os.path.realpath(sys.executable)


def report_python(needed: Sequence[str] = NEEDED) -> Callable[[Any], list[tuple[str, str, list[str]]]]:
    """Return a task that describes the Python it runs in: its path, its version, and the packages it lacks.

    It is pickled by value and uses the standard library alone, so that it runs where this package is missing.
    """
    names = tuple(needed)

    def report(_rows: Any) -> list[tuple[str, str, list[str]]]:
        import importlib.util
        import sys

        missing = [name for name in names if importlib.util.find_spec(name) is None]
        return [(sys.executable, ".".join(map(str, sys.version_info[:3])), missing)]

    return report


def refuse_python(answer: tuple[str, str, list[str]], *, on_connect: bool = False) -> None:
    """Raise ExecutorPythonError if the Python that `report_python` described lacks packages."""
    path, version, missing = answer
    if missing:
        alone = " (ship_package=True sends it)" if on_connect and list(missing) == ["spark_elastic"] else ""
        raise _python_error(f"{path} ({version})", f"it has no {', '.join(missing)}{alone}", on_connect)


def python_error_of(error: BaseException, python: str, *, on_connect: bool = False) -> ExecutorPythonError | None:
    """Return the error to raise for a Spark job that failed because of the executors' Python; None for other causes.

    `python` is the program that Spark starts on the executors.
    """
    text = str(error)
    theirs, problem = python, ""
    if _VERSION_DIFFERS.search(text):
        problem = "its minor version is another one"
    elif program := _NOT_RUN.search(text):
        theirs, problem = program[1], "there is no such program"
    elif _NOT_STARTED in text:
        problem = "it does not start"
    elif found := _NO_ARROW.search(text):
        problem = f"it has no {(found[1] or found[2]).lower()}" + (", but an older version or none" if found[2] else "")
    return _python_error(theirs, problem, on_connect) if problem else None


def _python_error(theirs: str, problem: str, on_connect: bool) -> ExecutorPythonError:
    ours, version = f"{sys.executable} ({platform.python_version()})", ".".join(platform.python_version_tuple()[:2])
    return ExecutorPythonError(theirs=theirs, ours=ours, problem=problem, version=version, on_connect=on_connect)
