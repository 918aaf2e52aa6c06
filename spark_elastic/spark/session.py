"""Make the `Cluster` of a session, once for each call of `run`, `fit`, `transform` and `materialize`."""

from __future__ import annotations

import os
from typing import Any

from spark_elastic.errors import NoSparkContextError
from spark_elastic.spark.classic import ClassicCluster
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.connect import ConnectCluster
from spark_elastic.spark.connect_session import active_session, check_packages, is_connect
from spark_elastic.spark.java import check_java


def cluster_of(spark: Any) -> Cluster:
    """Return the cluster behind a SparkSession or SparkContext; a cluster is returned itself. Calls nothing.

    Raises:
        NoSparkContextError: It is none of these.
    """
    if isinstance(spark, Cluster):
        return spark
    if is_connect(spark):
        return ConnectCluster(spark)
    try:
        from pyspark import SparkContext
    except ImportError:
        raise NoSparkContextError(
            "pyspark is not installed; install spark-elastic with the extra [spark], or use the local launcher"
        ) from None
    context = spark if isinstance(spark, SparkContext) else getattr(spark, "sparkContext", None)
    if not isinstance(context, SparkContext):
        raise NoSparkContextError(f"spark= must be a SparkSession or a SparkContext, not {type(spark).__name__}")
    return ClassicCluster(context)


def checked_cluster(spark: Any = None) -> Cluster:
    """Return the cluster of a session, which can run jobs; a cluster is checked again and returned itself.

    Without `spark`, that of the active session: the Connect session if this process has one. A process with a Connect
    session may have a SparkContext as well, that of a server which it runs itself.

    Raises:
        NoSparkContextError: There is none, or it was stopped, or its Connect server is gone.
        JavaNotFoundError: There is no context, and no Java to start one with.
        MissingExtraError: `SPARK_REMOTE` asks for Spark Connect, and its packages are missing.
        InvalidSettingsError: The session has settings under which workers cannot run.
        ExecutorPythonError: The user chose a Python for a local master that workers cannot run in.
    """
    cluster = cluster_of(_active() if spark is None else spark)
    cluster.check()
    return cluster


def _active() -> Any:
    """Return the active session or SparkContext."""
    session = active_session()
    if session is not None:
        return session
    try:
        from pyspark import SparkContext
    except ImportError:
        return None  # which `cluster_of` explains
    context = SparkContext._active_spark_context
    if context is not None:
        return context
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
