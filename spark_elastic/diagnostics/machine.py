"""Judge the Python installations of the driver and the executors: Java, packages, versions, torch, limits."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted, first_of
from spark_elastic.diagnostics.probe import ProbeReport
from spark_elastic.driver.preflight import check_java, java_major_version
from spark_elastic.errors import JavaNotFoundError

OLDEST_TORCH = (2, 6)
FEW_DESCRIPTORS = 1024
LITTLE_SPACE = 2**30
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")


def judge_java_here() -> Finding:
    """Find the Java that a new session on this machine would start with."""
    home = os.environ.get("JAVA_HOME")
    try:
        path = check_java()
    except JavaNotFoundError as error:
        says, _, fix = str(error).partition(". ")
        facts = {"java_home": home}
        return Finding("java", PROBLEM, says, fix or "install Java 17 or newer, or let JAVA_HOME name one", facts)
    printed = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30)
    text = printed.stderr + printed.stdout
    quoted = re.search(r'version "([^"]+)"', text)
    return java_found(path, quoted.group(1) if quoted else "of an unknown version", java_major_version(text))


def java_found(path: str, version: str, major: int | None) -> Finding:
    """Return the finding for a Java that can be used; `check_java` has refused those that cannot."""
    home = os.environ.get("JAVA_HOME")
    facts = {"path": path, "version": version, "major": major, "java_home": home}
    return Finding("java", OK, f"Java {version} at {path}; JAVA_HOME is {home or 'not set'}", facts=facts)


def judge_driver_packages(report: ProbeReport) -> list[Finding]:
    """Judge Python and the packages of the driver alone."""
    packages = report["packages"]
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    facts = {"python": report["python"], "packages": dict(packages), "spark_elastic": report["package"]}
    says = f"Python {report['python']}, spark_elastic {report['package']}, {named}"
    findings = [Finding("packages", OK, says, facts=facts)]
    if "pyspark" not in packages:
        findings.append(
            Finding("packages", PROBLEM, "pyspark is not installed here", "pip install 'spark-elastic[spark]'")
        )
    lacking = [name for name in ("pandas", "pyarrow") if name not in packages]
    if lacking:
        says = f"{' and '.join(lacking)} not installed here; estimators and materialize need both, run does not"
        findings.append(Finding("packages", WARNING, says, "pip install 'spark-elastic[spark]'"))
    if numbers(packages.get("torch", "0")) < OLDEST_TORCH:
        says = f"torch {packages.get('torch', 'is not installed')}; {_dotted(OLDEST_TORCH)} or newer is needed"
        findings.append(Finding("packages", PROBLEM, says, f"pip install 'torch>={_dotted(OLDEST_TORCH)}'"))
    return findings


def judge_executor_packages(driver: ProbeReport, reports: Sequence[ProbeReport]) -> list[Finding]:
    """Compare Python and the packages of the executors with the driver's."""
    return [_judge_package(driver, reports), *_judge_versions(driver, reports)]


def _judge_package(driver: ProbeReport, reports: Sequence[ProbeReport]) -> Finding:
    missing = [report for report in reports if report["package"] is None]
    others = [report for report in reports if report["package"] not in (None, driver["package"])]
    facts = {"driver": driver["package"], "executors": {report["executor"]: report["package"] for report in reports}}
    if missing:
        return Finding(
            "package on executors",
            PROBLEM,
            f"spark_elastic cannot be imported on {_executors(missing)}: {missing[0]['package_error']} "
            f"({missing[0]['executable']})",
            "install it in the Python of the executors, or send it: --py-files, spark.archives (docs/operations.md)",
            facts,
        )
    if others:
        return Finding(
            "package on executors",
            PROBLEM,
            f"spark_elastic is {others[0]['package']} on {_executors(others)} and {driver['package']} here",
            f"install spark_elastic {driver['package']} on them too",
            facts,
        )
    says = f"spark_elastic {driver['package']} on {counted(len(reports), 'executor')}, as here"
    return Finding("package on executors", OK, says, facts=facts)


def _judge_versions(driver: ProbeReport, reports: Sequence[ProbeReport]) -> list[Finding]:
    findings = []
    facts = {report["executor"]: {"python": report["python"], **report["packages"]} for report in reports}
    for name in ("python", "torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "keras"):
        own = version_of(driver, name)
        if own is None:
            continue
        without = [report for report in reports if version_of(report, name) is None]
        if without:
            needed = name in ("torch", "numpy", "cloudpickle")
            fix = f"install {name} {own} in {without[0]['executable']} on them" + (
                "" if needed else "; without it, what needs it fails there"
            )
            level = PROBLEM if needed else WARNING
            findings.append(Finding("versions", level, f"{name} {own} is missing on {_executors(without)}", fix))
        other = [
            report
            for report in reports
            if (found := version_of(report, name)) is not None and numbers(found)[:2] != numbers(own)[:2]
        ]
        if other:
            level = PROBLEM if name == "python" else WARNING
            says = f"{name} is {version_of(other[0], name)} on {_executors(other)} and {own} here"
            fix = "use one environment for the driver and all executors"
            fix += ": PYSPARK_PYTHON or spark.pyspark.python" if name == "python" else ""
            findings.append(Finding("versions", level, says, fix))
    if not findings:
        says = (
            f"Python {driver['python']} and the packages of {counted(len(reports), 'executor')} are those of the driver"
        )
        findings.append(Finding("versions", OK, says, facts=facts))
    return findings


def judge_torch(answers: Mapping[str, Any]) -> Finding:
    """Judge the import of torch.

    Args:
        answers: by executor, the answer of `probe.import_torch` or the exception in its place.
    """
    broken = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if broken:
        name, error = next(iter(broken.items()))
        return Finding(
            "torch on executors",
            PROBLEM,
            f"torch cannot be imported on {len(broken)} of {len(answers)} executors; {name}: {error}",
            "run `python -c 'import torch'` there with the Python of the executors; reinstall torch where it fails",
            {"errors": {name: str(error) for name, error in broken.items()}},
        )
    without = [name for name, answer in answers.items() if not answer["gloo"]]
    facts = {name: dict(answer) for name, answer in answers.items()}
    if without:
        return Finding(
            "torch on executors",
            PROBLEM,
            f"torch is built without Gloo on {', '.join(without)}",
            "install torch from its own wheels (pytorch.org)",
            facts,
        )
    versions = sorted({answer["torch"] for answer in answers.values()})
    says = f"torch {' and '.join(versions)} with Gloo imports on {counted(len(answers), 'executor')}"
    return Finding("torch on executors", OK, says, facts=facts)


def judge_limits(reports: Mapping[str, ProbeReport], slots: int) -> list[Finding]:
    """Judge the limits on open files and the free temporary space.

    Args:
        reports: by the name of the driver or executor.
        slots: workers that may run at the same time.
    """
    return [_judge_descriptors(reports, slots), _judge_temporary_space(reports)]


def _judge_descriptors(reports: Mapping[str, ProbeReport], slots: int) -> Finding:
    needed = max(FEW_DESCRIPTORS, 64 + 8 * slots)  # each worker holds two connections to each other one, and its files
    allowed = {name: report["descriptors"] for name, report in reports.items() if report["descriptors"]}
    few = {name: count for name, count in allowed.items() if count < needed}
    facts = {
        name: {key: report[key] for key in ("descriptors", "processes", "start_method", "system")}
        for name, report in reports.items()
    }
    if few:
        name, count = next(iter(few.items()))
        says = f"only {count} open files are allowed on {name}; {needed} are enough for {slots} workers"
        fix = f"raise it before the daemon starts: ulimit -n {max(needed, 65536)}, or LimitNOFILE= in its unit"
        return Finding("limits", WARNING, says, fix, facts)
    methods = ", ".join(sorted({report["start_method"] for report in reports.values()}))
    least = f"at least {min(allowed.values())}" if allowed else "unlimited"
    says = f"{least} open files a process; multiprocessing starts by {methods}"
    return Finding("limits", OK, says, facts=facts)


def _judge_temporary_space(reports: Mapping[str, ProbeReport]) -> Finding:
    facts = {name: report["temporary"]["free"] for name, report in reports.items()}
    known = {name: free for name, free in facts.items() if free is not None}
    little = [name for name, free in known.items() if free < LITTLE_SPACE]
    if little:
        folder = reports[little[0]]["temporary"]["path"]
        says = f"{known[little[0]] / 2**20:.0f} MiB are free in {folder} on {little[0]}"
        fix = "free some, or let TMPDIR and spark.local.dir name a larger disk"
        return Finding("temporary space", WARNING, says, fix, facts)
    says = f"at least {min(known.values(), default=0) / 2**30:.1f} GiB are free for temporary files"
    return Finding("temporary space", OK, says, facts=facts)


def version_of(report: ProbeReport, name: str) -> str | None:
    if name == "python":
        return str(report["python"])
    names = _TENSORFLOW if name == "tensorflow" else (name,)
    return next((report["packages"][known] for known in names if known in report["packages"]), None)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _executors(reports: Sequence[ProbeReport]) -> str:
    return first_of([f"executor {report['executor']} on {report['host']}" for report in reports])
