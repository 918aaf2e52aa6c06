"""The Python that Spark's executors run: chosen in local mode, and checked before the first job.

PySpark starts its Python workers with the `PYSPARK_PYTHON` of the driver's environment, or else with the `python3` that
comes first in PATH, which is another Python than this program's where a virtual environment is used without being
activated. It does not read `spark.pyspark.python`; spark-submit does, and sets the variable for the program it starts.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import platform
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_elastic.data.spark_connect import is_connect, is_local_master
from spark_elastic.errors import ExecutorPythonError, NotPicklableError

NEEDED = ("cloudpickle", "numpy", "torch", "spark_elastic")
"""Packages that a worker of any job imports."""
NEEDED_FOR_ROWS = ("pyarrow", *NEEDED)
"""The same of tasks that read or return rows."""
NEEDED_ON_CONNECT = ("pandas", *NEEDED_FOR_ROWS)
"""The same behind Spark Connect, whose tasks exchange Arrow batches."""
ON_CONNECT = "the Python that the PYSPARK_PYTHON of Spark Connect's server names, else its python3"
"""The executors' Python behind a Connect session, where no task could say its path."""
CHECK_TIMEOUT_S = 20.0
_PATIENCE_S = 20.0  # for a job of one task, where other jobs may have all slots
_DEFAULT = "python3"
_GLOBAL = "global "
_VERSION_DIFFERS = re.compile(r"PYTHON_VERSION_MISMATCH|Python in worker has different version")
_NOT_RUN = re.compile(r'Cannot run program "([^"]*)"')
_NO_ARROW = re.compile(r"No module named '(pandas|pyarrow)'|(PyArrow|Pandas) >= \S+ must be installed")
_checked: set[tuple[str, str]] = set()
"""(application, Python of its executors) of the checks that found nothing wrong."""


def choose_python(context: Any) -> None:
    """Have the Python workers of a local master run this program's Python, unless the user chose one.

    In local mode PySpark's own choice would need an activated environment; this program's Python has the packages. The
    context knows what the executors run: a variable that was set after it was made has no effect.

    Raises:
        ExecutorPythonError: The user chose one, and it does not run or lacks packages.
    """
    if not is_local_master(context.master):
        return
    about = (str(context.applicationId), str(context.pythonExec))
    if about in _checked:
        return
    if context.pythonExec == _DEFAULT != os.environ.get("PYSPARK_PYTHON"):
        if sys.executable and not _is_this_python(shutil.which(_DEFAULT)):
            context.pythonExec = sys.executable
    elif not _is_this_python(shutil.which(context.pythonExec)):
        _check_program(str(context.pythonExec))
    _checked.add(about)


def _is_this_python(program: str | None) -> bool:
    if program is None:
        return False
    # The folder decides as well: the Python of a virtual environment is a link to the one that made it.
    same_folder = os.path.dirname(os.path.abspath(program)) == os.path.dirname(sys.executable)
    return same_folder and os.path.realpath(program) == os.path.realpath(sys.executable)


def _check_program(program: str) -> None:
    """Run a Python of this machine, and raise ExecutorPythonError if it cannot run workers."""
    lacks = f"import importlib.util as u; print(' '.join(n for n in {NEEDED!r} if u.find_spec(n) is None))"
    code = f"import sys; print(sys.executable); print('%d.%d.%d' % sys.version_info[:3]); {lacks}"
    try:
        done = subprocess.run([program, "-c", code], capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
        # the last three lines: a sitecustomize or .pth file may print something first
        path, version, missing = ["", "", "", *done.stdout.splitlines()][-3:]
    except subprocess.TimeoutExpired:  # a machine that is busy says nothing about its Python
        return
    except OSError as error:
        raise python_error(program, problem=f"it cannot be run ({error})") from None
    if done.returncode != 0:
        raise python_error(program, problem=f"it cannot be run ({(done.stderr.strip() or 'no message')[-200:]})")
    refuse_python((path, version, missing.split()))


def report_python(needed: Sequence[str] = NEEDED) -> Callable[[], tuple[str, str, list[str]]]:
    """Return a function that describes the Python it is called in: its path, its version, and the packages it lacks.

    Spark's tasks call it. It is pickled by value and uses the standard library alone, so that it runs where this
    package is missing.
    """
    names = tuple(needed)

    def report() -> tuple[str, str, list[str]]:
        import importlib.util
        import sys

        missing = [name for name in names if importlib.util.find_spec(name) is None]
        return sys.executable, ".".join(map(str, sys.version_info[:3])), missing

    return report


def refuse_python(answer: tuple[str, str, list[str]], *, on_connect: bool = False) -> None:
    """Raise ExecutorPythonError if the Python that `report_python` described lacks packages."""
    path, version, missing = answer
    if missing:
        alone = " (ship_package=True sends it)" if on_connect and list(missing) == ["spark_elastic"] else ""
        problem = f"it has no {', '.join(missing)}{alone}"
        raise python_error(f"{path} ({version})", problem=problem, on_connect=on_connect)


def python_error_of(error: BaseException, python: str, *, on_connect: bool = False) -> ExecutorPythonError | None:
    """Return the error to raise for a Spark job that failed because of the executors' Python; None for other causes.

    `python` is the program that Spark starts on the executors.
    """
    text = str(error)
    if _VERSION_DIFFERS.search(text):
        return python_error(python, problem="its minor version is another one", on_connect=on_connect)
    if program := _NOT_RUN.search(text):
        return python_error(program[1], problem="there is no such program", on_connect=on_connect)
    if found := _NO_ARROW.search(text):
        package = (found[1] or found[2]).lower()
        problem = f"it has no {package}, or a version that is too old"
        return python_error(python, problem=problem, on_connect=on_connect)
    return None


def check_executors(context: Any) -> None:
    """Run a job of one task that looks at the executors' Python, once per application; in local mode no job is run.

    Args:
        context: A SparkContext, or a session of Spark Connect; there, a query runs in local mode too.

    Raises:
        ExecutorPythonError: It lacks packages, or has another minor version than this program's.
    """
    on_connect = is_connect(context)
    if not on_connect and is_local_master(context.master):
        return choose_python(context)
    ids = (context.session_id, "Spark Connect") if on_connect else (context.applicationId, context.pythonExec)
    about = (str(ids[0]), str(ids[1]))
    if about not in _checked:
        answer = _ask_on_connect(context, NEEDED_ON_CONNECT) if on_connect else _ask(context, NEEDED_FOR_ROWS)
        refuse_python(answer, on_connect=on_connect)
        _checked.add(about)
    return None


def _ask(context: Any, names: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the answer of `report_python` from a job of one task. Raise ExecutorPythonError if it cannot run."""
    report = report_python(names)
    try:
        answer: tuple[str, str, list[str]] = context.parallelize([0], 1).map(lambda _: report()).collect()[0]
    except Exception as error:  # py4j's, captured by pyspark or not
        translated = python_error_of(error, str(context.pythonExec))
        if translated is None:
            raise
        raise translated from None
    return answer


def _ask_on_connect(session: Any, names: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the same as `_ask` from a query."""
    report = report_python(names)

    def task(batches: Any) -> Any:
        import pyarrow as pa

        for _ in batches:
            pass
        path, version, missing = report()
        columns = {"path": [path], "version": [version], "missing": [" ".join(missing)]}
        yield pa.RecordBatch.from_pydict(columns)

    schema = "path string, version string, missing string"
    try:
        (answer,) = session.range(0, 1, 1, 1).mapInArrow(task, schema).collect()
    except Exception as error:  # pyspark's, with the server's text
        translated = python_error_of(error, ON_CONNECT, on_connect=True)
        if translated is None:
            raise
        raise translated from None
    return answer.path, answer.version, answer.missing.split()


# --- the user's own modules -------------------------------------------------------------------------


def check_modules(context: Any, pickled: bytes, env: Mapping[str, str] | None = None) -> None:
    """Run a job of one task that looks for the user's own modules that a pickle names; none if it names none.

    Where all slots are taken for longer than `_PATIENCE_S`, nothing is found out: the worker names what it lacks.

    Args:
        context: A SparkContext, or a session of Spark Connect.
        pickled: A pickle of protocol 4 or newer.
        env: What is set in the environment of workers. A PYTHONPATH is one that Spark's own Python does not have.

    Raises:
        NotPicklableError: Executors cannot import one of them.
    """
    files = {name: file for name in modules_in(pickled) if (file := _own_file(name)) is not None}
    remote = is_connect(context)
    about = (str(context.session_id if remote else context.applicationId), " ".join(sorted(files)))
    if not files or about in _checked or "PYTHONPATH" in (env or {}):
        return
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((_ask_on_connect if remote else _ask)(context, sorted(files))[2])
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, name="spark_elastic-modules", daemon=True).start()
    try:
        missing = answers.get(timeout=_PATIENCE_S)
    except queue.Empty:
        return
    if isinstance(missing, Exception):
        raise missing
    if missing:
        name, send = missing[0], "addArtifacts(..., pyfile=True) of the session" if remote else "sc.addPyFile"
        raise NotPicklableError(
            f"the executors cannot import {name}, which this program has from {files[name]}; send it with {send} "
            "(a file, or a zip of a package's folder), --py-files of spark-submit, or install it on the executors"
        )
    _checked.add(about)


def own_modules() -> set[str]:
    """Return the top-level modules that this program has imported and that are the user's own."""
    names = {name.partition(".")[0] for name in list(sys.modules)}
    return {name for name in names if _own_file(name) is not None}


def modules_in(pickled: bytes) -> set[str]:
    """Return the top-level modules that a pickle, and pickles within it, import as they are loaded."""
    found: set[str] = set()
    memo: list[str | None] = []
    last: list[str | None] = [None, None]  # the strings among the values that were pushed last
    for op, arg, _ in pickletools.genops(pickled):
        value: str | None = None
        if op.name == "MEMOIZE":
            memo.append(last[-1])
            continue
        if op.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            value = arg
        elif op.name in ("BINGET", "LONG_BINGET"):
            value = memo[int(arg or 0)]
        elif op.name == "STACK_GLOBAL":
            found.add(str(last[-2]))
            value = f"{_GLOBAL}{last[-1]}"
        elif op.name == "TUPLE1" and last[-2] == f"{_GLOBAL}subimport":  # cloudpickle's import of a module
            found.add(str(last[-1]))
        elif isinstance(arg, bytes) and arg[:1] == pickle.PROTO:
            with contextlib.suppress(ValueError, IndexError):  # bytes that only begin as a pickle does
                found |= modules_in(arg)
        last = [last[-1], value]
    return {name.partition(".")[0] for name in found}


def _own_file(name: str) -> str | None:
    """Return the file or folder of a module that is the user's own; None for installed ones, and for the program."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if not isinstance(path, str) or name in ("__main__", "__mp_main__", "spark_elastic"):
        return None
    installed = path.startswith(sysconfig.get_path("stdlib") + os.sep) or {*path.split(os.sep)} & {
        "site-packages",
        "dist-packages",
    }
    return None if installed else os.path.dirname(path) if path.endswith(f"{os.sep}__init__.py") else path


def python_error(theirs: str, *, problem: str, on_connect: bool = False) -> ExecutorPythonError:
    ours, version = f"{sys.executable} ({platform.python_version()})", ".".join(platform.python_version_tuple()[:2])
    return ExecutorPythonError(theirs=theirs, ours=ours, problem=problem, version=version, on_connect=on_connect)
