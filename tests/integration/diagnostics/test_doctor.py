"""The doctor on a real cluster, healthy and with planted faults, and as a command."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

import spark_elastic
from spark_elastic import clock
from spark_elastic.diagnostics.examination import Examination
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING
from tests.integration.clusters import local_cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(2, 1) as made:
        yield made


def level(report, check):
    return {finding.level for finding in report.of(check)}


def test_healthy_cluster_passes_every_check(cluster, tmp_path):
    report = spark_elastic.doctor(cluster.spark, store=str(tmp_path), num_proc=2)
    assert report.ok, report
    expected = {
        *("java", "Spark", "packages", "task slots", "executors", "package on executors", "versions"),
        *("executors → driver", "driver → executors", "executors ↔ executors", "storage", "clocks", "shared memory"),
        *("limits", "temporary space", "torch on executors"),
    }
    assert expected <= {finding.check for finding in report.findings}
    assert list(tmp_path.iterdir()) == []


def test_three_simultaneous_faults_are_all_found_and_the_other_checks_run(cluster, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['spark_elastic'] = None\n")
    file = tmp_path / "file"
    file.write_text("no folder")
    environment = cluster.sc.environment
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(hidden)  # of the tasks
    try:
        doctor = Examination(60.0, store=file / "store", wall=lambda: clock.wall() + 300, with_torch=False)
        doctor.check_driver()
        doctor.check_cluster(cluster.spark)
    finally:
        environment.pop("PYTHONPATH")
        if before is not None:
            environment["PYTHONPATH"] = before
    report = doctor.report()
    assert level(report, "package on executors") == {PROBLEM}
    assert level(report, "storage") == {PROBLEM}
    assert "300.0 s" in report.of("clocks")[0].says
    assert level(report, "clocks") == {PROBLEM}
    assert all(finding.fix for finding in report.findings if finding.level != OK)
    assert level(report, "executors ↔ executors") == {OK}


def test_hanging_executor_is_named_within_the_deadline(cluster):
    hanging = cluster.executors()["0"]
    stopped = [hanging, *cluster.python_processes("0")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        doctor = Examination(8.0, with_torch=False)
        checking = threading.Thread(
            target=lambda: (doctor.check_driver(), doctor.check_cluster(cluster.spark)), daemon=True
        )
        checking.start()
        checking.join(60.0)
        assert not checking.is_alive()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    report = doctor.report()
    (found,) = report.of("executors")
    assert found.level == WARNING
    assert "not executor 0" in found.says


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
    assert by_check["limits"]["level"] == OK


def test_command_ends_in_time_when_no_master_answers():
    words = [sys.executable, "-m", "spark_elastic", "doctor", "--json", "--master", "spark://127.0.0.1:1"]
    done = subprocess.run([*words, "--timeout", "8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    by_check = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "no session on spark://127.0.0.1:1" in by_check["Spark"]["says"]
    assert by_check["java"]["level"] == OK
