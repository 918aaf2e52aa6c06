"""The Spark session that the command line runs in: the submitted application's, or a new one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spark_elastic.errors import JavaNotFoundError, UsageError


@contextmanager
def spark_session(
    name: str, master: str | None, conf: Sequence[tuple[str, str]], *, slots: int | None = None, quiet: bool = True
) -> Iterator[Any]:
    """A SparkSession for the time of the block.

    Args:
        name: of the application, if it has none.
        master: None: the submitted one, else ``local[*]`` with at least `slots` task slots.
        conf: Spark settings; where spark-submit was given the same ones, those win.
    Raises:
        UsageError: no pyspark.
        JavaNotFoundError: no Java.
    """
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError("pyspark is not installed: pip install 'spark-elastic[spark]'") from None

    # set by spark-submit for the Python program that it starts
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    wanted = {"spark.ui.showConsoleProgress": "false", **dict(conf)}
    if not submitted:
        _choose_python(master, wanted)
    try:
        present = SparkConf()
    except Exception as error:  # pyspark raises a type of its own that has moved between versions
        if "JAVA_GATEWAY" in str(error) or "Java gateway" in str(error):
            raise JavaNotFoundError(
                "Spark did not start; it needs Java 17 or newer: install it, or set JAVA_HOME"
            ) from error
        raise

    if submitted:
        if master is not None and master != present.get("spark.master"):
            _note(f"--master {master} is ignored: spark-submit chose {present.get('spark.master')}")
        for key in [key for key in wanted if present.contains(key)]:
            value = wanted.pop(key)
            if value != present.get(key) and key in dict(conf):
                _note(f"--conf {key}={value} is ignored: spark-submit set it to {present.get(key)}")
    else:
        wanted["spark.master"] = master or _local_master(present.get("spark.master", "local[*]"), slots)
    wanted.setdefault("spark.app.name", name)

    builder = SparkSession.builder
    for key, value in wanted.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        if quiet:
            session.sparkContext.setLogLevel("ERROR")
        yield session
    finally:
        session.stop()


def _local_master(configured: str | None, slots: int | None) -> str:
    """``local[*]`` has as many slots as cores; who asks for more workers than that on one machine gets them."""
    if configured not in (None, "local[*]"):
        return str(configured)
    cores = os.cpu_count() or 1
    return f"local[{slots}]" if slots is not None and slots > cores else "local[*]"


def _choose_python(master: str | None, conf: dict[str, str]) -> None:
    """Have local workers run in this Python: PySpark's own choice is whatever `python3` is on the PATH.

    ``spark.pyspark.python`` is read by spark-submit only, so it is passed on here in the way that works without it.
    """
    if "spark.pyspark.python" in conf:
        os.environ["PYSPARK_PYTHON"] = conf["spark.pyspark.python"]
    elif master is None or master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _note(text: str) -> None:
    print(f"spark-elastic: {text}", file=sys.stderr)
