"""What can be wrong with a single Python: this driver's, or an executor's beside it. Facts in, findings out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted, worst
from spark_elastic.driver.preflight import check_java, java_major_version
from spark_elastic.errors import JavaNotFoundError

OLDEST_TORCH = (2, 6)
FEW_DESCRIPTORS = 1024
LITTLE_SPACE = 2**30
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")

Look = Mapping[str, Any]
"""What `probe.look_around` returns."""


def java_of_this_machine() -> Finding:
    """The Java that a new session would start with."""
    home = os.environ.get("JAVA_HOME")
    try:
        path = check_java()
    except JavaNotFoundError as error:
        says, _, fix = str(error).partition(". ")
        facts = {"java_home": home}
        return Finding("java", PROBLEM, says, fix or "install Java 17 or newer, or let JAVA_HOME name one", facts)
    said = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30)
    text = said.stderr + said.stdout
    return java_found(path, _quoted(text) or "of an unknown version", home, java_major_version(text))


def java_found(path: str, version: str, home: str | None, major: int | None) -> Finding:
    facts = {"path": path, "version": version, "major": major, "java_home": home}
    return Finding("java", OK, f"Java {version} at {path}; JAVA_HOME is {home or 'not set'}", facts=facts)


def packages_here(look: Look) -> list[Finding]:
    """Python and packages of the driver."""
    packages = look["packages"]
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    facts = {"python": look["python"], "packages": dict(packages), "spark_elastic": look["package"]}
    says = f"Python {look['python']}, spark_elastic {look['package']}, {named}"
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


def packages_there(here: Look, looks: Sequence[Look]) -> list[Finding]:
    """Python and packages of the executors, against the driver's."""
    return [_same_package(here, looks), *_same_versions(here, looks)]


def _same_package(here: Look, looks: Sequence[Look]) -> Finding:
    missing = [look for look in looks if look["package"] is None]
    others = [look for look in looks if look["package"] not in (None, here["package"])]
    facts = {"driver": here["package"], "executors": {look["executor"]: look["package"] for look in looks}}
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
            f"spark_elastic is {others[0]['package']} on {_executors(others)} and {here['package']} here",
            f"install spark_elastic {here['package']} on them too",
            facts,
        )
    says = f"spark_elastic {here['package']} on {counted(len(looks), 'executor')}, as here"
    return Finding("package on executors", OK, says, facts=facts)


def _same_versions(here: Look, looks: Sequence[Look]) -> list[Finding]:
    findings = []
    facts = {look["executor"]: {"python": look["python"], **look["packages"]} for look in looks}
    for name in ("python", "torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "keras"):
        own = version_of(here, name)
        if own is None:
            continue
        without = [look for look in looks if version_of(look, name) is None]
        if without:
            needed = name in ("torch", "numpy", "cloudpickle")
            fix = f"install {name} {own} in {without[0]['executable']} on them" + (
                "" if needed else "; without it, what needs it fails there"
            )
            level = PROBLEM if needed else WARNING
            findings.append(Finding("versions", level, f"{name} {own} is missing on {_executors(without)}", fix))
        other = [
            look
            for look in looks
            if (found := version_of(look, name)) is not None and numbers(found)[:2] != numbers(own)[:2]
        ]
        if other:
            level = PROBLEM if name == "python" else WARNING
            says = f"{name} is {version_of(other[0], name)} on {_executors(other)} and {own} here"
            fix = "use one environment for the driver and all executors"
            fix += ": PYSPARK_PYTHON or spark.pyspark.python" if name == "python" else ""
            findings.append(Finding("versions", level, says, fix))
    if not findings:
        says = f"Python {here['python']} and the packages of {counted(len(looks), 'executor')} are those of the driver"
        findings.append(Finding("versions", OK, says, facts=facts))
    return findings


def torch_of(answers: Mapping[str, Any]) -> Finding:
    """answers: by executor, `probe.torch_in_a_process`'s or the exception in its place."""
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


def limits(looks: Mapping[str, Look], slots: int) -> list[Finding]:
    """Descriptors, temporary space and how processes start. looks: by name of the place."""
    needed = max(FEW_DESCRIPTORS, 64 + 8 * slots)  # each worker holds two connections to each other one, and its files
    few = {name: look["descriptors"] for name, look in looks.items() if (look["descriptors"] or needed) < needed}
    least = min((look["descriptors"] for look in looks.values() if look["descriptors"]), default=None)
    facts = {
        name: {key: look[key] for key in ("descriptors", "processes", "start_method", "system")}
        for name, look in looks.items()
    }
    findings = []
    if few:
        name, count = next(iter(few.items()))
        says = f"only {count} open files are allowed on {name}; {needed} are enough for {slots} workers"
        fix = f"raise it before the daemon starts: ulimit -n {max(needed, 65536)}, or LimitNOFILE= in its unit"
        findings.append(Finding("limits", WARNING, says, fix, facts))
    else:
        methods = sorted({look["start_method"] for look in looks.values()})
        says = f"{'unlimited' if least is None else f'at least {least}'} open files a process"
        findings.append(Finding("limits", OK, f"{says}; multiprocessing starts by {', '.join(methods)}", facts=facts))
    spaces = {name: look["temporary"] for name, look in looks.items()}
    little = {name: at for name, at in spaces.items() if at["free"] is not None and at["free"] < LITTLE_SPACE}
    free = min((at["free"] for at in spaces.values() if at["free"] is not None), default=0)
    level = worst([WARNING] if little else [OK])
    says = f"at least {free / 2**30:.1f} GiB are free for temporary files"
    if little:
        name, at = next(iter(little.items()))
        says = f"{at['free'] / 2**20:.0f} MiB are free in {at['path']} on {name}"
    fix = "free some, or let TMPDIR and spark.local.dir name a larger disk" if little else ""
    findings.append(Finding("temporary space", level, says, fix, {name: at["free"] for name, at in spaces.items()}))
    return findings


def version_of(look: Look, name: str) -> str | None:
    if name == "python":
        return str(look["python"])
    names = _TENSORFLOW if name == "tensorflow" else (name,)
    return next((look["packages"][known] for known in names if known in look["packages"]), None)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _quoted(text: str) -> str | None:
    found = re.search(r'version "([^"]+)"', text)
    return found.group(1) if found else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _executors(looks: Sequence[Look]) -> str:
    names = [f"executor {look['executor']} on {look['host']}" for look in looks]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
