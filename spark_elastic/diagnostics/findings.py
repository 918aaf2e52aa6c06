"""What the doctor finds: `Finding`, `Report`, and the rules that make findings of the facts of machines and of Spark.

`between_machines` has the checks that take two machines: connections, storage, clocks and shared memory.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_elastic.diagnostics.probe import ProbeReport
from spark_elastic.driver.preflight import check_java, java_major_version
from spark_elastic.driver.spark.cluster import SlotCount
from spark_elastic.errors import PYTHON_SETTING, JavaNotFoundError
from spark_elastic.membership.reasons import counted
from spark_elastic.redaction import redacted

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_MARKS = {OK: "ok", WARNING: "warning", PROBLEM: "PROBLEM"}
_COLOURS = {OK: "#2e7d32", WARNING: "#b26a00", PROBLEM: "#c62828"}
OLDEST_TORCH = (2, 6)
FEW_DESCRIPTORS = 1024
LITTLE_SPACE = 2**30
"""Free bytes of a disk below which there is a warning."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check, such as "clocks".
        level: "ok", "warning" or "problem".
        says: what was found, with its numbers.
        fix: what to do, in one line; empty if nothing has to be done.
        facts: the numbers behind `says`, for programs.
    """

    check: str
    level: str
    says: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", redacted(self.says))  # an error of a storage may name its address


@dataclass(frozen=True)
class Report:
    """The findings in the order in which they were made. Prints as text; a notebook shows it as a table."""

    findings: tuple[Finding, ...]
    took_s: float

    @property
    def ok(self) -> bool:
        """True if no finding is a problem; warnings do not count."""
        return not any(finding.level == PROBLEM for finding in self.findings)

    def of(self, check: str) -> list[Finding]:
        """Return the findings of one check."""
        return [finding for finding in self.findings if finding.check == check]

    @property
    def summary(self) -> str:
        counts = [(sum(f.level == level for f in self.findings), level) for level in (PROBLEM, WARNING)]
        named = [counted(count, level) for count, level in counts if count]
        if not named:
            return f"{len(self.findings)} findings, all well ({self.took_s:.1f} s)"
        return f"{' and '.join(named)} among {len(self.findings)} findings ({self.took_s:.1f} s)"

    def to_json(self) -> str:
        report = {"ok": self.ok, "took_s": round(self.took_s, 3), "findings": [asdict(one) for one in self.findings]}
        return json.dumps(report, indent=2, default=str)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{_MARKS[finding.level]:>7}  {finding.check}: {finding.says}")
            if finding.fix:
                lines.append(f"{'':7}  → {finding.fix}")
        return "\n".join([*lines, "", self.summary])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for finding in self.findings:
            fix = f"<br><b>→ {html.escape(finding.fix)}</b>" if finding.fix else ""
            rows.append(
                f'<tr><td style="color:{_COLOURS[finding.level]}"><b>{finding.level}</b></td>'
                f"<td>{html.escape(finding.check)}</td>"
                f'<td style="text-align:left">{html.escape(finding.says)}{fix}</td></tr>'
            )
        return f"<table><tbody>{''.join(rows)}</tbody></table><p>{html.escape(self.summary)}</p>"


def first_of(names: list[str], most: int = 3) -> str:
    """Join the first names; " and 2 more" stands for the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- Java and packages --------------------------------------------------------------------------------


def judge_java_here() -> Finding:
    """Find the Java that a new session on this machine would start with."""
    try:
        path = check_java()
    except JavaNotFoundError as error:
        says, _, fix = str(error).partition(". ")
        facts = {"java_home": os.environ.get("JAVA_HOME")}
        return Finding("java", PROBLEM, says, fix or "install Java 17 or newer, or let JAVA_HOME name one", facts)
    printed = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30)
    quoted = re.search(r'version "([^"]+)"', printed.stderr + printed.stdout)
    return java_found(path, quoted.group(1) if quoted else "of an unknown version")


def java_found(path: str, version: str) -> Finding:
    """Return the finding for a Java that can be used; `check_java` has refused those that cannot."""
    home = os.environ.get("JAVA_HOME")
    major = java_major_version(f'version "{version}"')
    facts = {"path": path, "version": version, "major": major, "java_home": home}
    return Finding("java", OK, f"Java {version} at {path}; JAVA_HOME is {home or 'not set'}", facts=facts)


def judge_driver_packages(report: ProbeReport) -> list[Finding]:
    """Judge Python and the packages of the driver alone."""
    packages = report["packages"]
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    facts = {"python": report["python"], "packages": dict(packages), "spark_elastic": report["package"]}
    says = f"Python {report['python']}, spark_elastic {report['package']}, {named}"
    findings = [Finding("packages", OK, says, facts=facts)]
    install = "pip install 'spark-elastic[spark]'"
    if "pyspark" not in packages:
        findings.append(Finding("packages", PROBLEM, "pyspark is not installed here", install))
    lacking = [name for name in ("pandas", "pyarrow") if name not in packages]
    if lacking:
        says = f"{' and '.join(lacking)} not installed here; estimators and materialize need both, run does not"
        findings.append(Finding("packages", WARNING, says, install))
    if _release(packages.get("torch", "0")) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        says = f"torch {packages.get('torch', 'is not installed')}; {oldest} or newer is needed"
        findings.append(Finding("packages", PROBLEM, says, f"pip install 'torch>={oldest}'"))
    return findings


def judge_executor_packages(driver: ProbeReport, reports: Sequence[ProbeReport]) -> list[Finding]:
    """Compare Python and the packages of the executors with the driver's."""
    return [_judge_package(driver, reports), *_judge_versions(driver, reports)]


def _judge_package(driver: ProbeReport, reports: Sequence[ProbeReport]) -> Finding:
    missing = [report for report in reports if report["package"] is None]
    others = [report for report in reports if report["package"] not in (None, driver["package"])]
    facts = {"driver": driver["package"], "executors": {report["executor"]: report["package"] for report in reports}}
    found = functools.partial(Finding, "package on executors", facts=facts)
    if missing:
        says = f"spark_elastic cannot be imported on {_executors(missing)}: {missing[0]['package_error']}"
        fix = "install it in the Python of the executors, or send it: --py-files, spark.archives (docs/operations.md)"
        return found(PROBLEM, f"{says} ({missing[0]['executable']})", fix)
    if others:
        says = f"spark_elastic is {others[0]['package']} on {_executors(others)} and {driver['package']} here"
        return found(PROBLEM, says, f"install spark_elastic {driver['package']} on them too")
    return found(OK, f"spark_elastic {driver['package']} on {counted(len(reports), 'executor')}, as here")


def _judge_versions(driver: ProbeReport, reports: Sequence[ProbeReport]) -> list[Finding]:
    findings = []
    for name in ("python", "torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "keras"):
        own = _version_of(driver, name)
        if own is None:
            continue
        theirs = [(report, _version_of(report, name)) for report in reports]
        without = [report for report, version in theirs if version is None]
        if without:
            needed = name in ("torch", "numpy", "cloudpickle")
            fix = f"install {name} {own} in {without[0]['executable']} on them"
            fix += "" if needed else "; without it, what needs it fails there"
            level = PROBLEM if needed else WARNING
            findings.append(Finding("versions", level, f"{name} {own} is missing on {_executors(without)}", fix))
        other = [report for report, version in theirs if version and _release(version)[:2] != _release(own)[:2]]
        if other:
            says = f"{name} is {_version_of(other[0], name)} on {_executors(other)} and {own} here"
            fix = "use one environment for the driver and all executors"
            fix += f": set {PYTHON_SETTING} before the session starts" if name == "python" else ""
            findings.append(Finding("versions", PROBLEM if name == "python" else WARNING, says, fix))
    if findings:
        return findings
    facts = {report["executor"]: {"python": report["python"], **report["packages"]} for report in reports}
    executors = counted(len(reports), "executor")
    says = f"Python {driver['python']} and the packages of {executors} are those of the driver"
    return [Finding("versions", OK, says, facts=facts)]


def _version_of(report: ProbeReport, name: str) -> str | None:
    if name == "python":
        return str(report["python"])
    names = ("tensorflow", "tensorflow-cpu") if name == "tensorflow" else (name,)
    return next((report["packages"][known] for known in names if known in report["packages"]), None)


def _release(version: str) -> tuple[int, ...]:
    """Return up to three numbers of a version: (2, 6, 0) for "2.6.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _executors(reports: Sequence[ProbeReport]) -> str:
    return first_of([f"executor {report['executor']} on {report['host']}" for report in reports])


def judge_torch(answers: Mapping[str, Any]) -> Finding:
    """Judge the import of torch.

    Args:
        answers: by executor, the answer of `probe.import_torch` or the exception in its place.
    """
    broken = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if broken:
        name, error = next(iter(broken.items()))
        says = f"torch cannot be imported on {len(broken)} of {len(answers)} executors; {name}: {error}"
        fix = "run `python -c 'import torch'` there with the Python of the executors; reinstall torch where it fails"
        facts: dict[str, Any] = {"errors": {name: str(error) for name, error in broken.items()}}
        return Finding("torch on executors", PROBLEM, says, fix, facts)
    found = functools.partial(Finding, "torch on executors", facts={name: dict(each) for name, each in answers.items()})
    without = [name for name, answer in answers.items() if not answer["gloo"]]
    if without:
        says = f"torch is built without Gloo on {', '.join(without)}"
        return found(PROBLEM, says, "install torch from its own wheels (pytorch.org)")
    versions = sorted({answer["torch"] for answer in answers.values()})
    return found(OK, f"torch {' and '.join(versions)} with Gloo imports on {counted(len(answers), 'executor')}")


# --- limits of the machines ---------------------------------------------------------------------------


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
    keys = ("descriptors", "processes", "start_method", "system")
    facts = {name: {key: report[key] for key in keys} for name, report in reports.items()}
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


# --- Spark's slots, executors and GPUs ----------------------------------------------------------------


def judge_slots(slots: SlotCount, num_proc: int | None, *, busy: int, dynamic: bool, task_cpus: str) -> Finding:
    """Compare the task slots with the workers that are to train.

    Args:
        slots: the slots that there are and can be.
        num_proc: workers that are to train; None for at least one.
        busy: tasks that run now.
        dynamic: True with dynamic allocation.
        task_cpus: the value of spark.task.cpus.
    """
    free = max(slots.now - busy, 0)
    facts = {
        "total": slots.now,
        "free": free,
        "most": slots.most,
        "executors": slots.executors,
        "dynamic_allocation": dynamic,
        "needed": num_proc,
    }
    found = functools.partial(Finding, "task slots", facts=facts)
    says = f"{counted(slots.now, 'task slot')} on {counted(slots.executors, 'executor')}, {free} free"
    need = num_proc or 1
    if dynamic:
        bound = "without a bound" if slots.most is None else f"to {slots.most}"
        says += f"; dynamic allocation may grow them {bound}, without barrier mode, which is not needed"
        if slots.most is not None and slots.most < need:
            fix = f"raise spark.dynamicAllocation.maxExecutors, or train with num_proc={slots.most}"
            return found(PROBLEM, f"{says}; {need} are needed", fix)
    elif slots.now < need:
        fix = "add executors, or check that the application got any (the master's page)"
        if slots.now:
            fix = f"add executors or cores, or lower num_proc to {slots.now}"
        return found(PROBLEM, f"{says}; {need} are needed", f"{fix}; each slot takes spark.task.cpus={task_cpus} cores")
    elif free < need:
        says += f"; {need} have to be free at the same time to begin"
        return found(WARNING, says, "wait for the other jobs, or cancel them in Spark's UI")
    return found(OK, says)


def judge_slots_on_connect(now: int | None, num_proc: int | None, *, dynamic: bool, task_cpus: str) -> Finding:
    """Compare the task slots behind a Spark Connect server, busy or not, with the workers that are to train.

    Args:
        now: the slots that there are; None if the server does not show them.
        num_proc: workers that are to train; None for at least one.
        dynamic: True with dynamic allocation.
        task_cpus: the value of spark.task.cpus.
    """
    found = functools.partial(
        Finding, "task slots", facts={"total": now, "dynamic_allocation": dynamic, "needed": num_proc}
    )
    if now is None:
        return found(WARNING, "the Spark Connect server does not show its task slots", "give num_proc to run and fit")
    says = f"{counted(now, 'task slot')}, busy or not"
    if dynamic:
        return found(OK, f"{says}; dynamic allocation may add some")
    if now < (num_proc or 1):
        fix = f"add executors or cores, or lower num_proc to {now}" if now else "add executors"
        says += f"; {num_proc or 1} are needed"
        return found(PROBLEM, says, f"{fix}; each slot takes spark.task.cpus={task_cpus} cores")
    return found(OK, says)


def judge_executors(
    reports: Sequence[ProbeReport], expected: Sequence[str], wanted: int, waited_s: float, error: str | None
) -> Finding:
    """Name the executors that did not answer.

    Args:
        reports: from all probes that connected.
        expected: ids of the registered executors.
        wanted: number of probes that were started.
        waited_s: seconds that the doctor waited for them.
        error: why the probes' job failed; None if it did not.
    """
    answered = {str(report["executor"]) for report in reports}
    silent = sorted(set(expected) - answered)
    facts = {"answered": sorted(answered), "silent": silent, "probes": wanted, "error": error}
    found = functools.partial(Finding, "executors", facts=facts)
    if error is not None:
        fix = "the executors' logs say more (stderr in Spark's UI)"
        if "PYTHON_VERSION_MISMATCH" in error or "different minor version" in error:
            fix = f"before the session starts, set {PYTHON_SETTING} to the same Python everywhere"
        return found(PROBLEM, f"the doctor's tasks failed: {error}", fix)
    if not answered:
        says = f"none of {wanted} tasks has run within {waited_s:.0f} s; {len(expected)} executors are registered"
        fix = "see in Spark's UI whether the slots are busy or executors are pending, and in their logs why they hang"
        return found(PROBLEM, says, fix)
    if silent:
        names = f"executor{'s' if len(silent) > 1 else ''} {first_of(silent, 5)}"
        says = (
            f"{len(answered)} of {len(answered) + len(silent)} executors answered within {waited_s:.0f} s; not {names}"
        )
        return found(WARNING, says, "their slots are busy, or they hang: see their logs and thread dumps in Spark's UI")
    return found(OK, f"{counted(len(answered), 'executor')} answered, with {len(reports)} of {wanted} tasks")


def judge_gpus(amount: str | None, reports: Sequence[ProbeReport], torch: Mapping[str, Any]) -> Finding | None:
    """Compare the GPUs that Spark gives to tasks with those that torch sees; None if there is no GPU.

    Args:
        amount: the value of spark.task.resource.gpu.amount.
        reports: from all probes.
        torch: by executor, the answer of `probe.import_torch` or the exception in its place.
    """
    seen = {name: answer for name, answer in torch.items() if isinstance(answer, Mapping)}
    facts = {
        "amount": amount,
        "addresses": {f"{report['executor']}/{report['number']}": report["gpus"] for report in reports},
        "torch": {name: answer["gpus"] for name, answer in seen.items()},
    }
    found = functools.partial(Finding, "GPUs", facts=facts)
    if not amount:
        with_gpus = [report for report in reports if report["nvidia_devices"]]
        if not with_gpus:
            return None
        count, where = max(each["nvidia_devices"] for each in with_gpus), f"executor {with_gpus[0]['executor']}"
        says = f"{where} has {count} GPUs, but Spark hands none to tasks: workers of a host choose by local rank"
        return found(
            WARNING, says, "set spark.{executor,task}.resource.gpu.amount and a discovery script (docs/gpus.md)"
        )
    without = [report for report in reports if not report["gpus"]]
    if without:
        says = f"spark.task.resource.gpu.amount={amount}, but a task on executor {without[0]['executor']} got none"
        return found(
            PROBLEM, says, "check spark.executor.resource.gpu.amount and the discovery script on the executors"
        )
    blind = [name for name, answer in seen.items() if not answer["gpus"]]
    if blind:
        build = seen[blind[0]]["cuda_build"]
        says = f"tasks get GPUs, but torch on {blind[0]} sees none" + ("" if build else ": it is built without CUDA")
        fix = "install a CUDA build of torch there" if not build else "check the driver: nvidia-smi on that machine"
        return found(PROBLEM, says, fix)
    handed = Counter((report["executor"], address) for report in reports for address in report["gpus"])
    for (executor, address), tasks in handed.items():
        if tasks > 1:
            says = f"GPU {address} of executor {executor} is handed to more than one task at a time"
            fix = "set spark.task.resource.gpu.amount=1 for NCCL; workers that share a GPU reduce through Gloo"
            return found(WARNING, says, fix)
    return found(OK, f"each of {len(reports)} tasks has a GPU of its own")
