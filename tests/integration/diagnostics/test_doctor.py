"""The doctor on a real cluster, healthy and with planted faults, and as a command."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

import spark_elastic
from spark_elastic import clock
from spark_elastic.diagnostics.findings import OK, PROBLEM
from tests.integration.clusters import local, local_cluster, module_fixture

pytestmark = pytest.mark.cluster
cluster = module_fixture(local_cluster, 2, 1)


def level(report, check):
    return {finding.level for finding in report.of(check)}


def test_too_few_slots_and_a_store_that_cannot_be_written_are_both_found(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    with local(2) as here:
        report = spark_elastic.doctor(here.spark, store=file / "store", num_proc=3, timeout=300)
    assert level(report, "task slots") == {PROBLEM}
    assert level(report, "storage") == {PROBLEM}
    assert level(report, "workers") == {OK}, "with the workers that there is room for"
    assert all(finding.fix for finding in report.findings if finding.level != OK)


@pytest.mark.nightly
def test_healthy_cluster_passes_every_check(cluster, tmp_path):
    report = spark_elastic.doctor(cluster.spark, store=str(tmp_path), num_proc=2, timeout=300)
    assert report.ok, report
    expected = ["packages", "java", "Spark", "task slots", "versions", "clocks", "workers", "storage"]
    assert [finding.check for finding in report.findings] == expected
    assert level(report, "clocks") == {OK}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_hanging_executor_is_a_problem_within_the_deadline(cluster):
    hanging = cluster.executors()["0"]
    stopped = [hanging, *cluster.python_processes("0")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    began = clock.monotonic()
    try:
        report = spark_elastic.doctor(cluster.spark, timeout=12.0)
        assert clock.monotonic() - began < 30.0
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert level(report, "workers") | level(report, "deadline") == {PROBLEM}


def test_command_names_a_java_that_is_too_old_and_exits_with_1(tmp_path):
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\necho \'openjdk version "11.0.2"\' >&2\n[ "$1" = -version ]\n')
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for name in ("JAVA_HOME", "SPARK_HOME"):
        env.pop(name, None)
    words = [sys.executable, "-m", "spark_elastic", "doctor", "--json", "--master", "local[1]"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert "is Java 11 and 17 or newer is needed" in by_check["java"]["says"]
    assert "openjdk" in by_check["java"]["fix"]
    assert by_check["Spark"]["level"] == PROBLEM


@pytest.mark.nightly
def test_command_ends_in_time_when_no_master_answers():
    words = [sys.executable, "-m", "spark_elastic", "doctor", "--json", "--master", "spark://127.0.0.1:1"]
    done = subprocess.run([*words, "--timeout", "8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    by_check = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "no session on spark://127.0.0.1:1" in by_check["Spark"]["says"]
    assert by_check["java"]["level"] == OK
