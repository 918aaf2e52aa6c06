from __future__ import annotations

import functools
import sys
import threading

import pytest

from spark_elastic.driver import preflight
from spark_elastic.errors import (
    InvalidSettingsError,
    JavaNotFoundError,
    MissingExtraError,
    NoSparkContextError,
    NotPicklableError,
)

LOCK = threading.Lock()


class Model:
    def __init__(self) -> None:
        self.layers = [1, threading.Lock()]


def test_without_a_context_the_error_shows_how_to_create_one(monkeypatch):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr(preflight, "check_java", lambda: "/usr/bin/java")
    with pytest.raises(NoSparkContextError, match="no active SparkContext; create one"):
        preflight.check_spark()


def test_without_a_context_and_without_java_the_missing_java_is_what_is_reported(monkeypatch):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JavaNotFoundError, match="apt-get install -y openjdk-17-jre-headless"):
        preflight.check_spark()


def test_spark_argument_that_is_not_a_session_is_reported():
    with pytest.raises(NoSparkContextError, match="not str"):
        preflight.check_spark("local[4]")


def test_stopped_connect_session_is_reported():
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session", "is_stopped": True})()
    with pytest.raises(NoSparkContextError, match="Spark Connect session was stopped; create a new one"):
        preflight.check_spark(session)


def test_spark_remote_without_a_session_is_not_silently_classic(monkeypatch):
    pytest.importorskip("grpc_status")
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setenv("SPARK_REMOTE", "sc://cluster:15002")
    with pytest.raises(NoSparkContextError, match="SPARK_REMOTE=sc://cluster:15002 is set, but there is no Spark Conn"):
        preflight.check_spark()


def test_java_home_that_has_no_java_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaNotFoundError, match=f"JAVA_HOME={tmp_path} has no bin/java"):
        preflight.check_java()


def fake_java(folder, says, code):
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    java.chmod(0o755)
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
        preflight.check_java()


@pytest.mark.parametrize(
    ("said", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_292"', 8),
        ('openjdk version "25"', 25),
        ("?", None),
    ],
)
def test_java_major_version_is_read_in_the_old_and_the_new_form(said, major):
    assert preflight.java_major_version(said) == major


def test_captured_object_that_cannot_be_pickled_is_named_by_its_path():
    model = Model()

    def train():
        return model

    with pytest.raises(NotPicklableError) as caught:
        preflight.pickled(train)
    assert caught.value.path.endswith("train → model → .layers → [1]")
    assert caught.value.type_name == "lock"


def test_global_that_a_local_function_uses_is_named():
    def train():
        return LOCK

    train.__module__ = "__main__"  # as in a notebook: pickled by value, with the globals that it uses
    with pytest.raises(NotPicklableError, match="train → LOCK cannot be sent to the workers: lock"):
        preflight.pickled(train)


def test_argument_that_cannot_be_pickled_is_named():
    with pytest.raises(NotPicklableError, match=r"args\[1\] → \['f'\]"):
        preflight.pickled(print, (1, {"f": threading.Lock()}))
    with pytest.raises(NotPicklableError, match=r"kwargs\['lock'\]"):
        preflight.pickled(print, kwargs={"lock": threading.Lock()})


def test_partial_and_bound_method_are_looked_into():
    with pytest.raises(NotPicklableError, match="keywords"):
        preflight.pickled(functools.partial(print, file=threading.Lock()))
    with pytest.raises(NotPicklableError, match=r"→ self → \.layers"):
        preflight.pickled(BoundTrain().train)


class BoundTrain(Model):
    def train(self):
        return self.layers


def test_object_that_contains_itself_does_not_trap_the_search():
    knot: list[object] = [threading.Lock()]
    knot.insert(0, knot)
    with pytest.raises(NotPicklableError, match=r"args\[0\] → \[1\]"):
        preflight.pickled(print, (knot,))


class Session:
    """As much of a SparkContext as its settings."""

    def __init__(self, settings):
        self._conf = settings


def test_ports_of_a_session_are_its_settings():
    session = Session({"spark.elastic.driver.port": "42100-42103"})
    assert preflight.session_ports(session, "driver_port") == (42100, 42103)
    assert preflight.session_ports(session, "agent_ports").are_any


def test_invalid_port_of_a_session_is_named_as_the_session_names_it():
    with pytest.raises(InvalidSettingsError, match=r"spark\.elastic\.agent\.ports=.*neither a port nor"):
        preflight.session_ports(Session({"spark.elastic.agent.ports": "many"}), "agent_ports")


@pytest.mark.parametrize(
    ("module", "package"), [("grpc", "grpcio"), ("google.rpc", "googleapis-common-protos"), ("pyarrow", "pyarrow")]
)
def test_packages_that_spark_connect_lacks_are_named(monkeypatch, module, package):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setenv("SPARK_REMOTE", "sc://cluster:15002")
    pytest.importorskip("grpc_status")
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"needs {package}, .*spark-elastic\[connect\]"):
        preflight.check_spark()
