"""Spark Connect: sessions whose scheduler and JVM are on a server, out of reach from here."""

from __future__ import annotations

from typing import Any

from spark_elastic.errors import SparkConnectNotSupportedError


def is_connect(thing: Any) -> bool:
    """Whether a session, or a DataFrame, is one of Spark Connect."""
    return any(cls.__module__.startswith("pyspark.sql.connect") for cls in type(thing).__mro__)


def connect_error() -> SparkConnectNotSupportedError:
    return SparkConnectNotSupportedError(
        "this is a Spark Connect session: its scheduler is on the server, out of reach from here; run the driver "
        "program on the cluster (spark-submit, or a classic session: SparkSession.builder.master(...))"
    )


def refuse_connect(thing: Any) -> None:
    """Raises: SparkConnectNotSupportedError: `thing` is a session, or a DataFrame, of Spark Connect."""
    if is_connect(thing):
        raise connect_error()
