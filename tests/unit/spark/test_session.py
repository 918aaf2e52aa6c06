from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest

import spark_elastic
from spark_elastic.errors import InvalidSettingsError, JavaNotFoundError, MissingExtraError, NoSparkContextError
from spark_elastic.spark import java
from spark_elastic.spark import session as session_module
from spark_elastic.spark.classic import ClassicCluster
from spark_elastic.spark.cluster import SlotCount
from spark_elastic.spark.connect import ConnectCluster
from spark_elastic.spark.connect_session import databricks_of
from spark_elastic.spark.session import checked_cluster


def test_without_a_context_the_error_shows_how_to_create_one(monkeypatch):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr(session_module, "check_java", lambda: "/usr/bin/java")
    with pytest.raises(NoSparkContextError, match="no active SparkContext; create one"):
        checked_cluster()


def test_without_a_context_and_without_java_the_missing_java_is_what_is_reported(monkeypatch):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JavaNotFoundError, match="apt-get install -y openjdk-17-jre-headless"):
        checked_cluster()


def test_spark_argument_that_is_not_a_session_is_reported():
    with pytest.raises(NoSparkContextError, match="not str"):
        checked_cluster("local[4]")


def test_stopped_connect_session_is_reported():
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session", "is_stopped": True})()
    with pytest.raises(NoSparkContextError, match="Spark Connect session was stopped; create a new one"):
        checked_cluster(session)


def test_spark_remote_without_a_session_is_not_silently_classic(monkeypatch):
    pytest.importorskip("grpc_status")
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setenv("SPARK_REMOTE", "sc://cluster:15002")
    with pytest.raises(NoSparkContextError, match="SPARK_REMOTE=sc://cluster:15002 is set, but there is no Spark Conn"):
        checked_cluster()


def connect_session(**metadata: str):
    """A Connect session as this package looks at it, whose server would not answer."""
    kind = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session", "is_stopped": False})
    session = kind()
    session.session_id, session.client = "one", SimpleNamespace(metadata=lambda: list(metadata.items()))
    session.conf = SimpleNamespace(get=lambda name, default=None: default)
    return session


@pytest.mark.parametrize(
    ("environment", "metadata", "name"),
    [
        ({"DATABRICKS_RUNTIME_VERSION": "16.4"}, {}, "a Databricks cluster with standard access mode"),
        ({"DATABRICKS_RUNTIME_VERSION": "client.4.1"}, {}, "serverless compute of Databricks"),
        ({"DATABRICKS_ENV_VERSION": "4"}, {}, "serverless compute of Databricks"),
        ({}, {"x-databricks-cluster-id": "0601-182128-dcbte59m"}, "Databricks Connect"),
        ({}, {"x-databricks-session-id": "1"}, "Databricks Connect"),
    ],
)
def test_platform_whose_tasks_reach_no_program_is_named_before_anything_runs(environment, metadata, name, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    session = connect_session(**metadata)
    with pytest.raises(NoSparkContextError, match=f"cannot train on {name}, whose tasks do not reach .*dedicated"):
        spark_elastic.run(print, num_proc=1, spark=ConnectCluster(session))
    cluster = ConnectCluster(session)
    with pytest.raises(NoSparkContextError, match=name):
        cluster.check_reach(None, None)
    cluster.check_platform("10.1.2.3")  # an address that the user says they reach


def test_session_elsewhere_is_on_no_platform_that_is_known_by_name():
    assert databricks_of(connect_session(user="me")) is None


def test_java_home_that_has_no_java_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaNotFoundError, match=f"JAVA_HOME={tmp_path} has no bin/java"):
        java.check_java()


def fake_java(folder, says, code):
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("says", "code", "error"),
    [
        ('openjdk version "11.0.2" 2019-01-15', 0, "is Java 11 and 17 or newer is needed"),
        ("Unable to locate a Java Runtime.", 1, "Unable to locate a Java Runtime"),  # the stub of macOS
    ],
)
def test_java_that_is_too_old_or_none_is_refused_with_what_it_says(monkeypatch, tmp_path, says, code, error):
    monkeypatch.setenv("JAVA_HOME", fake_java(tmp_path, says, code))
    with pytest.raises(JavaNotFoundError, match=error):
        java.check_java()


def cluster_with(settings):
    """Return a cluster of a context that has settings alone."""
    return ClassicCluster(SimpleNamespace(_conf=settings))


def test_ports_of_a_session_are_its_settings():
    cluster = cluster_with({"spark.elastic.driver.port": "42100-42103"})
    assert cluster.ports("driver_port", None) == (42100, 42103)
    assert cluster.ports("driver_port", 42200) == (42200, 42200)
    assert cluster.ports("agent_ports", None).are_any


def test_invalid_port_of_a_session_is_named_as_the_session_names_it():
    with pytest.raises(InvalidSettingsError, match=r"spark\.elastic\.agent\.ports=.*neither a port nor"):
        cluster_with({"spark.elastic.agent.ports": "many"}).ports("agent_ports", None)


@pytest.mark.parametrize(("setting", "value"), [("driver_host", "10.0.0.1"), ("ship_package", True)])
def test_settings_of_spark_connect_are_refused_by_other_sessions(setting, value):
    given = {"driver_host": None, "ship_package": False, setting: value}
    with pytest.raises(InvalidSettingsError, match=f"{setting} is for Spark Connect"):
        cluster_with({}).apply(**given)


@pytest.mark.parametrize("amount", [None, "2"])
def test_local_master_has_no_resources_of_tasks_to_give(amount):
    cluster = ClassicCluster(SimpleNamespace(_conf={"spark.task.resource.gpu.amount": amount}, master="local[4]"))
    cluster.take_resources(None, gpu_each=True)
    assert cluster.resources == {}
    with pytest.raises(InvalidSettingsError, match=r"resources=\{'gpu': 1\}: a local master gives tasks no resources"):
        cluster.take_resources({"gpu": 1}, gpu_each=True)
    with pytest.raises(InvalidSettingsError, match="resources= needs a classic session"):
        ConnectCluster(connect_session()).take_resources({"gpu": 1}, gpu_each=True)


@pytest.mark.parametrize(
    ("low", "high", "now", "most", "bounds"),
    [("2", "8", 0, 16, (4, 16)), (None, "8", 4, 16, (1, 16)), ("2", None, 4, None, (4, 4))],
)
def test_workers_that_nobody_counts_are_those_of_dynamic_allocation(low, high, now, most, bounds):
    given = {"spark.dynamicAllocation.minExecutors": low, "spark.dynamicAllocation.maxExecutors": high}
    context = SimpleNamespace(_conf={"spark.dynamicAllocation.enabled": "true", **given}, master="yarn")
    cluster = ClassicCluster(context)
    cluster.count_slots = lambda: SlotCount(now, most, "here")
    assert cluster.worker_bounds() == bounds


def test_bounds_of_dynamic_allocation_are_known_behind_spark_connect():
    session = connect_session()
    settings = {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "3"}
    settings |= {"spark.executor.cores": "5", "spark.task.cpus": "2", "spark.master": "yarn"}
    session.conf = settings
    assert ConnectCluster(session).worker_bounds() == (1, 6)


@pytest.mark.parametrize("speculates", ["true", "false"])
def test_speculation_by_duration_is_refused_while_it_is_on(speculates):
    settings = {"spark.speculation": speculates, "spark.speculation.task.duration.threshold": "60s"}
    refused = pytest.raises(InvalidSettingsError, match="threshold=60s would have Spark run a second copy")
    with refused if speculates == "true" else contextlib.nullcontext():
        cluster_with(settings).check_speculation()


@pytest.mark.parametrize(
    ("module", "package"), [("grpc", "grpcio"), ("google.rpc", "googleapis-common-protos"), ("pyarrow", "pyarrow")]
)
def test_packages_that_spark_connect_lacks_are_named(monkeypatch, module, package):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setenv("SPARK_REMOTE", "sc://cluster:15002")
    pytest.importorskip("grpc_status")
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"needs {package}, .*extra \[connect\]"):
        checked_cluster()
