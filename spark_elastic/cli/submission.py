"""The Spark session of a command."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from spark_elastic.errors import JavaNotFoundError, UsageError
from spark_elastic.spark.connect_session import check_packages
from spark_elastic.spark.java import check_java

_CONNECT_PORT = 15002
_ANSWER_S = 5.0


@contextmanager
def connect_session(url: str, conf: Sequence[tuple[str, str]]) -> Iterator[Any]:
    """Open a session of Spark Connect for the block. Raise UsageError if the URL is wrong or no server answers."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError("pyspark is not installed: install spark-elastic with the extra [connect]") from None
    check_packages("--remote")
    parts = urlsplit(url)
    if parts.scheme != "sc" or not parts.hostname:
        raise UsageError(f"--remote takes a URL such as sc://host:15002, not {url!r}")
    try:
        socket.create_connection((parts.hostname, parts.port or _CONNECT_PORT), _ANSWER_S).close()
    except (OSError, ValueError) as error:  # gRPC would try for minutes
        raise UsageError(f"no Spark Connect server answers at {parts.netloc}: {error}") from None
    # in its environment, a program has one kind of session
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    session = SparkSession.builder.remote(url).config(map=dict(conf)).getOrCreate()
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def spark_session(
    name: str, master: str | None, conf: Sequence[tuple[str, str]], *, slots: int | None = None, quiet: bool = True
) -> Iterator[Any]:
    """Open a SparkSession for the block. Raise UsageError without pyspark, and JavaNotFoundError without Java.

    Under spark-submit, its own master, name and settings come before these. Without a master it is ``local[*]``, with
    at least `slots` task slots. `quiet`: show only errors of Spark's log.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError("pyspark is not installed: install spark-elastic with the extra [spark]") from None

    wanted = {"spark.ui.showConsoleProgress": "false", "spark.app.name": name, **dict(conf)}
    # set by spark-submit for the Python program that it starts
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        _drop_submitted(wanted, master, dict(conf))
    else:
        # only spark-submit reads spark.pyspark.python, and PySpark would take the first `python3` on the PATH
        if "spark.pyspark.python" in wanted:
            os.environ["PYSPARK_PYTHON"] = wanted["spark.pyspark.python"]
        elif master is None or master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # local[*] has a slot for each core
        cores = os.cpu_count() or 1
        wanted["spark.master"] = master or (f"local[{slots}]" if (slots or 0) > cores else "local[*]")

    try:
        session = SparkSession.builder.config(map=wanted).getOrCreate()
    except Exception as error:  # the type that pyspark raises has moved between versions
        # checked only now: Spark's own configuration may name a Java that is not on the PATH
        if "JAVA_GATEWAY" not in str(error) and "Java gateway" not in str(error):
            raise
        check_java()
        raise JavaNotFoundError("Spark did not start although Java was found; see Spark's messages above") from error
    try:
        if quiet:
            session.sparkContext.setLogLevel("ERROR")
        yield session
    finally:
        session.stop()


def _drop_submitted(wanted: dict[str, str], master: str | None, asked_for: dict[str, str]) -> None:
    """Remove the settings that spark-submit was given, with a note where the command line differs."""
    from pyspark import SparkConf, SparkContext

    # without the JVM, which runs already, a SparkConf does not know the submitted settings
    SparkContext._ensure_initialized()
    submitted = SparkConf()
    named_after_us = submitted.get("spark.app.name") == os.path.basename(sys.argv[0])
    if master is not None and master != submitted.get("spark.master"):
        _note(f"--master {master} is ignored: spark-submit chose {submitted.get('spark.master')}")
    for key in [key for key in wanted if submitted.contains(key)]:
        if key == "spark.app.name" and named_after_us:
            continue
        value = wanted.pop(key)
        if key in asked_for and value != submitted.get(key):
            _note(f"--conf {key}={value} is ignored: spark-submit set it to {submitted.get(key)}")


def _note(text: str) -> None:
    print(f"spark-elastic: {text}", file=sys.stderr)
