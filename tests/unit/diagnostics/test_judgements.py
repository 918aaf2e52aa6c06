"""Judge the facts that probes report, with one planted fault at a time."""

import pytest

from spark_elastic.diagnostics import between_machines, findings
from spark_elastic.diagnostics.between_machines import Attempt
from spark_elastic.diagnostics.clusters import ClassicCluster, ConnectCluster
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, Report
from spark_elastic.driver.spark.cluster import SlotCount


def probe_report(**changes):
    usual = {
        "number": 0,
        "executor": "1",
        "host": "10.0.0.3",
        "hostname": "three",
        "python": "3.11.7",
        "executable": "/usr/bin/python3",
        "system": "Linux x86_64",
        "package": "0.1.0",
        "packages": {"torch": "2.13.0", "numpy": "2.1.0", "cloudpickle": "3.1", "pyspark": "4.0.0"},
        "start_method": "fork",
        "descriptors": 65536,
        "processes": None,
        "temporary": {"path": "/tmp", "free": 50 * 2**30},
        "nvidia_devices": 0,
        "gpus": [],
        "attempts": [{"to": "10.0.0.1:4000", "ms": 1.0}],
    }
    return {**usual, **changes}


def slots(now=4, *, most=4, busy=0, executors=2, dynamic=False):
    """The slots, and the arguments of `judge_slots` that describe how they are used."""
    return SlotCount(now, most, executors), {"busy": busy, "dynamic": dynamic, "task_cpus": "1"}


def test_executor_like_the_driver_is_fine():
    found = findings.judge_executor_packages(probe_report(), [probe_report()])
    assert {finding.level for finding in found} == {OK}


def test_missing_package_is_a_problem_that_names_the_executors_python():
    there = probe_report(package=None, package_error="ModuleNotFoundError: No module named 'spark_elastic'")
    found = findings.judge_executor_packages(probe_report(), [probe_report(), there])[0]
    assert found.level == PROBLEM
    assert "No module named 'spark_elastic'" in found.says
    assert "/usr/bin/python3" in found.says


def test_other_package_version_is_a_problem():
    found = findings.judge_executor_packages(probe_report(), [probe_report(package="0.0.9")])[0]
    assert (found.level, "0.0.9" in found.says, "0.1.0" in found.fix) == (PROBLEM, True, True)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"python": "3.12.1"}, PROBLEM),
        ({"python": "3.11.9"}, OK),
        ({"packages": {**probe_report()["packages"], "torch": "2.6.0"}}, WARNING),
        ({"packages": {"numpy": "2.1.0", "cloudpickle": "3.1", "pyspark": "4.0.0"}}, PROBLEM),
    ],
)
def test_level_of_a_version_difference_depends_on_the_package(changes, level):
    found = findings.judge_executor_packages(probe_report(), [probe_report(**changes)])[1:]
    assert [finding.level for finding in found] == [level]


def test_old_torch_on_the_driver_is_a_problem():
    found = findings.judge_driver_packages(probe_report(packages={**probe_report()["packages"], "torch": "2.5.1"}))
    assert any(f.level == PROBLEM and "torch>=2.6" in f.fix for f in found)


def test_failed_import_of_torch_is_reported_with_its_reason():
    found = findings.judge_torch({"executor 1": RuntimeError("libgomp.so.1: cannot open shared object file")})
    assert (found.level, "libgomp" in found.says) == (PROBLEM, True)


def test_few_descriptors_and_little_space_are_warnings():
    poor = probe_report(descriptors=256, temporary={"path": "/tmp", "free": 1000})
    found = findings.judge_limits({"executor 1": poor}, slots=2)
    assert [finding.level for finding in found] == [WARNING, WARNING]
    assert "ulimit -n" in found[0].fix


@pytest.mark.parametrize(
    ("there", "need", "level"),
    [
        (slots(4), 4, OK),
        (slots(4), 5, PROBLEM),
        (slots(0, most=0, executors=0), None, PROBLEM),
        (slots(4, busy=3), 2, WARNING),
        (slots(0, most=8, executors=0, dynamic=True), 8, OK),
        (slots(0, most=8, executors=0, dynamic=True), 9, PROBLEM),
        (slots(0, most=None, executors=0, dynamic=True), 900, OK),
    ],
)
def test_slots_are_compared_with_num_proc(there, need, level):
    count, use = there
    assert findings.judge_slots(count, need, **use).level == level


def test_silent_executors_are_named():
    found = findings.judge_executors([probe_report()], ["1", "2"], wanted=4, waited_s=9.0, error=None)
    assert (found.level, "executor 2" in found.says) == (WARNING, True)
    assert findings.judge_executors([], ["1"], wanted=4, waited_s=9.0, error=None).level == PROBLEM


def test_python_mismatch_suggests_pyspark_python():
    error = "[PYTHON_VERSION_MISMATCH] Python in worker has different version 3.9 than that in driver 3.11"
    found = findings.judge_executors([], ["1"], wanted=1, waited_s=1.0, error=error)
    assert (found.level, "set PYSPARK_PYTHON in this program" in found.fix) == (PROBLEM, True)


def test_gpus_that_nobody_asked_for_are_pointed_out_and_none_is_silent():
    assert findings.judge_gpus(None, [probe_report()], {}) is None
    assert findings.judge_gpus(None, [probe_report(nvidia_devices=2)], {}).level == WARNING


def test_task_without_gpu_and_torch_without_cuda_are_problems():
    sees_none = {"executor 1": {"gpus": [], "cuda_build": None}}
    assert findings.judge_gpus("1", [probe_report(gpus=[])], {}).level == PROBLEM
    found = findings.judge_gpus("1", [probe_report(gpus=["0"])], sees_none)
    assert (found.level, "built without CUDA" in found.says) == (PROBLEM, True)


def test_gpu_shared_by_two_tasks_is_a_warning():
    reports = [probe_report(number=0, gpus=["0"]), probe_report(number=1, gpus=["0"])]
    found = findings.judge_gpus("0.5", reports, {"executor 1": {"gpus": ["H100"], "cuda_build": "12.6"}})
    assert (found.level, "Gloo" in found.fix) == (WARNING, True)
    apart = [probe_report(number=0, gpus=["0"]), probe_report(number=1, gpus=["1"])]
    assert findings.judge_gpus("1", apart, {}).level == OK


def test_unreachable_driver_address_is_reported_with_one_that_works():
    attempts = [{"to": "172.17.0.1:4000", "error": "TimeoutError: timed out"}, {"to": "10.0.0.1:4000", "ms": 2.0}]
    (found,) = between_machines.judge_executors_to_driver([probe_report(attempts=attempts)], ClassicCluster)
    assert (found.level, found.fix) == (PROBLEM, "set spark.driver.host=10.0.0.1")


def test_on_spark_connect_any_address_that_executors_reach_will_do():
    attempts = [{"to": "10.0.0.1:7", "error": "timed out"}, {"to": "10.0.1.1:7", "ms": 1.0}]
    (found,) = between_machines.judge_executors_to_driver([probe_report(attempts=attempts)], ConnectCluster)
    assert found.level == OK
    assert "10.0.1.1:7" in found.says
    unreached = [{**attempt, "error": "timed out"} for attempt in attempts]
    for attempt in unreached:
        attempt.pop("ms", None)
    (found,) = between_machines.judge_executors_to_driver([probe_report(attempts=unreached)], ConnectCluster)
    assert found.level == PROBLEM
    assert "nor at 10.0.1.1:7" in found.says
    assert "driver_host=" in found.fix


def test_slots_behind_spark_connect_are_compared_without_knowing_which_are_busy():
    def judge(now, **changes):
        return findings.judge_slots_on_connect(now, 3, **{"dynamic": False, "task_cpus": "1", **changes})

    assert judge(3).level == OK
    assert judge(2).level == PROBLEM
    assert "lower num_proc to 2" in judge(2).fix
    assert judge(2, dynamic=True).level == OK
    assert judge(None).level == WARNING


def test_unconnected_pair_is_a_problem_and_a_filtered_interface_a_warning():
    attempts = [
        Attempt("A", "B", "eth0", "10.0.0.3", 1.0),
        Attempt("A", "B", "docker0", "172.17.0.1", error="another machine answers there"),
        Attempt("B", "A", "eth0", "10.0.0.2", error="timed out"),
    ]
    found = between_machines.judge_between_executors(attempts, "32768-60999")
    assert [finding.level for finding in found] == [PROBLEM, WARNING]
    assert "eth0 (10.0.0.2): timed out" in found[0].says
    assert "reached on eth0 (10.0.0.3), but not on docker0" in found[1].says
    assert [f.level for f in between_machines.judge_between_executors(attempts[:1], "32768-60999")] == [OK]


def test_clock_skew_counts_only_beyond_the_error_of_its_measurement():
    fine = {"A": (0.002, 0.001), "B": (5.0, 6.0)}
    assert [f.level for f in between_machines.judge_clocks(fine)] == [OK]
    levels = [f.level for f in between_machines.judge_clocks({"A": (-5.0, 0.1), "B": (300.0, 0.1)})]
    assert levels == [WARNING, PROBLEM]


def test_file_invisible_to_others_is_a_problem():
    written = {"the driver": {"ms": 1.0, "free": 9 * 2**30}, "A": {"ms": 1.0, "free": 9 * 2**30}}
    blind = {"the driver": {"ms": 1.0, "missing": {}}, "A": {"ms": 1.0, "missing": {"f/driver": "FileNotFoundError"}}}
    (found,) = between_machines.judge_storage("/data", written, blind, {"f/driver": "the driver", "f/0": "A"})
    assert found.level == PROBLEM
    assert "A does not see in /data what the driver has written" in found.says


def test_unopened_memory_is_a_warning_only_where_it_is_supported():
    assert between_machines.judge_shared_memory({"h": "PermissionError"}, {"Linux x86_64"}).level == WARNING
    assert between_machines.judge_shared_memory({"h": "PermissionError"}, {"Linux aarch64"}).level == WARNING
    assert between_machines.judge_shared_memory({"h": "PermissionError"}, {"Linux s390x"}).level == OK


def test_report_is_ok_without_problems_and_has_all_its_forms():
    fine = Finding("clocks", OK, "all are right")
    bad = Finding("storage", PROBLEM, "<cannot> be written", "let it")
    report = Report((fine, bad), 1.0)
    assert not report.ok
    assert Report((fine,), 1.0).ok
    assert "→ let it" in str(report)
    assert "&lt;cannot&gt;" in report._repr_html_()
    assert '"ok": false' in report.to_json()


def test_credentials_in_the_errors_of_a_storage_are_redacted() -> None:
    refused = {"the driver": OSError("403 for https://account/c?sig=hunter2")}
    (found,) = between_machines.judge_storage("https://account/c", refused, {}, {})
    assert "hunter2" not in str(found)
