"""Checks before a job starts: the SparkContext, Java, and whether the function can be pickled."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spark_elastic.data.spark_connect import (
    active_session,
    check_packages,
    is_connect,
    server_answers,
    server_of,
    setting_of,
)
from spark_elastic.data.spark_python import choose_python
from spark_elastic.errors import InvalidSettingsError, JavaNotFoundError, NoSparkContextError, NotPicklableError
from spark_elastic.redaction import redacted
from spark_elastic.wire.ports import ANY, Ports, valid_ports

if TYPE_CHECKING:
    from pyspark import SparkContext

_JAVA = 17
_MAX_PARTS = 200
"""Parts of an object that are searched for one that cannot be pickled."""

SESSION_PORTS = {"driver_port": "spark.elastic.driver.port", "agent_ports": "spark.elastic.agent.ports"}
"""Settings of a Spark session that give the ports of its jobs."""

# --- Spark --------------------------------------------------------------------------------------


def check_spark(spark: Any = None) -> Any:
    """Return the SparkContext of `spark` (a SparkSession or SparkContext), or the Spark Connect session that it is.

    Without `spark`, the active one: the Connect session if this process has one. A process with a Connect session may
    have a SparkContext as well, that of a server which it runs itself.

    Raises:
        NoSparkContextError: There is none, or it was stopped, or its Connect server is gone.
        JavaNotFoundError: There is no context, and no Java to start one with.
        MissingExtraError: `SPARK_REMOTE` asks for Spark Connect, and its packages are missing.
        InvalidSettingsError: The context has settings under which workers cannot run.
        ExecutorPythonError: The user chose a Python for a local master that workers cannot run in.
    """
    try:
        from pyspark import SparkContext
    except ImportError:
        raise NoSparkContextError(
            "pyspark is not installed; pip install 'spark-elastic[spark]', or use the local launcher"
        ) from None
    if spark is None:
        spark = active_session()
    if is_connect(spark):
        _check_session(spark)
        return spark
    if spark is None:
        context = SparkContext._active_spark_context
        if context is None:
            if "SPARK_REMOTE" in os.environ:
                check_packages("Spark Connect (SPARK_REMOTE is set)")
                raise NoSparkContextError(
                    f"SPARK_REMOTE={os.environ['SPARK_REMOTE']} is set, but there is no Spark Connect session yet; "
                    "create one first (SparkSession.builder.getOrCreate()) or pass spark="
                )
            check_java()
            raise NoSparkContextError(
                "there is no active SparkContext; create one first "
                "(SparkSession.builder.master('local[4]').getOrCreate()) or pass spark="
            )
    elif isinstance(spark, SparkContext):
        context = spark
    else:
        context = getattr(spark, "sparkContext", None)
        if not isinstance(context, SparkContext):
            raise NoSparkContextError(f"spark= must be a SparkSession or a SparkContext, not {type(spark).__name__}")
    if context._jsc is None:
        raise NoSparkContextError("the SparkContext was stopped; create a new one")
    _check_settings(context)
    choose_python(context)
    return context


def _check_session(session: Any) -> None:
    """Raise if a Connect session cannot run a job."""
    if session.is_stopped:
        raise NoSparkContextError("the Spark Connect session was stopped; create a new one")
    if not server_answers(session, 3.0):
        host, port = server_of(session)
        raise NoSparkContextError(
            f"the Spark Connect server at {host}:{port} does not answer; start it (sbin/start-connect-server.sh), or "
            "create a session with its present address"
        )
    try:
        speculates = setting_of(session, "spark.speculation", "false") == "true"
        _check_speculation(speculates, setting_of(session, "spark.speculation.task.duration.threshold"))
    except InvalidSettingsError:
        raise
    except Exception as error:  # pyspark's, with the version; for example because the session has expired
        raise NoSparkContextError(
            f"the Spark Connect session cannot be used: {first_line(error)}; create a new one"
        ) from None


def _check_settings(sc: SparkContext) -> None:
    from py4j.clientserver import ClientServer

    # Without pinned threads a job group that is set in one thread may apply to another thread's job: stopping one slot
    # would stop another one, or none.
    if not isinstance(sc._gateway, ClientServer):
        raise InvalidSettingsError("PYSPARK_PIN_THREAD=false is not supported; unset it and start the session again")
    threshold = setting_of(sc, "spark.speculation.task.duration.threshold")
    _check_speculation(setting_of(sc, "spark.speculation") == "true", threshold)


def _check_speculation(speculates: bool, threshold: str | None) -> None:
    if speculates and threshold is not None:
        raise InvalidSettingsError(
            f"spark.speculation.task.duration.threshold={threshold} would have Spark run a second copy of every worker "
            "that trains for longer; remove it, or set spark.speculation=false"
        )


def session_ports(context: Any, setting: str) -> Ports:
    """Return the ports that a session gives for `driver_port` or `agent_ports`; any if it gives none.

    `context` is a SparkContext, or a session of Spark Connect.

    Raises:
        InvalidSettingsError: The session's value is not a port or a range of ports.
    """
    name = SESSION_PORTS[setting]
    value = setting_of(context, name)
    return ANY if value is None else valid_ports(name, value)


# --- Java ---------------------------------------------------------------------------------------


def check_java() -> str:
    """Return the path of the `java` that Spark would use.

    Raises:
        JavaNotFoundError: There is none, or it is too old. The message has the command that installs one.
    """
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if home and not os.access(java or "", os.X_OK):
        raise _no_java(f"JAVA_HOME={home} has no bin/java; unset JAVA_HOME, or let it name a Java {_JAVA} or newer")
    if java is None:
        raise _no_java(f"Spark needs Java {_JAVA} or newer and there is no `java`")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_java(f"{java} cannot be run ({error})") from None
    text = done.stderr + done.stdout
    if done.returncode != 0:  # without Java, macOS has a `java` that prints how to get one
        raise _no_java(f"{java} does not run: {text.strip()[:200]}")
    major = java_major_version(text)
    if major is not None and major < _JAVA:
        raise _no_java(f"{java} is Java {major} and {_JAVA} or newer is needed")
    return java


def java_major_version(said: str) -> int | None:
    """Return the major version in the output of `java -version` ("1.8.0_292" is 8), or None if there is none."""
    found = re.search(r'version "(\d+)(?:\.(\d+))?', said)
    if found is None:
        return None
    major = int(found.group(1))
    return int(found.group(2) or 0) if major == 1 else major


def _no_java(problem: str) -> JavaNotFoundError:
    return JavaNotFoundError(f"{problem}. {_how_to_install_java(sys.platform)}")


def _how_to_install_java(platform: str) -> str:
    mac = f"brew install openjdk@{_JAVA}"
    if platform == "darwin":
        return f"On macOS: {mac}"
    return (
        f"On Debian and Ubuntu: sudo apt-get install -y openjdk-{_JAVA}-jre-headless; "
        f"on Fedora: sudo dnf install java-{_JAVA}-openjdk-headless; on macOS: {mac}"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most 200 characters; the name of its type if it has no text."""
    lines = redacted(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


# --- the function -------------------------------------------------------------------------------


def pickled(fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> bytes:
    """Return the call `(fn, args, kwargs)`, pickled.

    Raises:
        NotPicklableError: Names the object inside the call that cannot be pickled, and the path to it
            (`fn → model → lock`).
    """
    from spark_elastic.wire.pickling import dumps

    call = (fn, tuple(args), dict(kwargs or {}))
    try:
        return dumps(call)
    except Exception as error:
        path, culprit, reason = _find_culprit(call, error)
        raise NotPicklableError(
            f"{path} cannot be sent to the workers: {type(culprit).__name__} cannot be pickled ({reason}); create it "
            "inside the function, or pass what it is made from",
            path=path,
            type_name=type(culprit).__name__,
        ) from None


def _find_culprit(call: tuple[Any, Any, Any], error: Exception) -> tuple[str, Any, str]:
    """Find the innermost part of a call that cannot be pickled. Returns its path, the part, and the reason."""
    fn, args, kwargs = call
    path = f"function {getattr(fn, '__qualname__', type(fn).__name__)}"
    found = path, fn, first_line(error)  # if each part can be pickled, but not all together
    parts: Iterator[tuple[str, Any]] = iter(
        [
            (path, fn),
            *((f"args[{index}]", value) for index, value in enumerate(args)),
            *((f"kwargs[{key!r}]", value) for key, value in kwargs.items()),
        ]
    )
    outer = ""
    seen: set[int] = set()
    while True:
        for name, part in itertools.islice(parts, _MAX_PARTS):
            if id(part) not in seen and (why := _why_not(part)) is not None:
                found = outer + name, part, why
                break
        else:
            return found
        seen.add(id(part))
        outer = f"{found[0]} → "
        parts = _parts(part)


def _why_not(value: Any) -> str | None:
    from spark_elastic.wire.pickling import dumps

    try:
        dumps(value)
    except Exception as error:
        return first_line(error)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its name in the user's code."""
    if inspect.ismethod(value):
        yield "self", value.__self__
        value = value.__func__
    if inspect.isfunction(value):
        captured = inspect.getclosurevars(value)
        yield from captured.nonlocals.items()
        yield from captured.globals.items()
        for name, parameter in inspect.signature(value).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                yield f"default of {name}", parameter.default
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items())
