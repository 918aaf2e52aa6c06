"""One check-up: what jobs use is tried as jobs use it, within one deadline. An error of a check becomes a finding."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import metadata
from typing import Any

from spark_elastic import clock
from spark_elastic.data.shared_store import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, Report
from spark_elastic.errors import InvalidSettingsError, JavaNotFoundError, SparkElasticError
from spark_elastic.jobs.run import run_async
from spark_elastic.membership.reasons import counted
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.java import check_java
from spark_elastic.spark.session import checked_cluster

MOST_WORKERS = 32
"""Workers of the job that is tried if `num_proc` is not given."""
SKEW_WARNING_S = 1.0
SKEW_PROBLEM_S = 60.0
OLDEST_TORCH = (2, 6)
_OF_JOB = 0.75
"""The part of the time limit in which the job has to be done; the rest is for ending it and for the store."""
_PACKAGES = ("spark-elastic", "torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "keras")


@dataclass(eq=False)
class Examination:
    """One check-up of a driver and its cluster. The settings are those of `doctor`."""

    timeout_s: float
    _: KW_ONLY
    num_proc: int | None = None
    store: Any = None
    storage_options: Mapping[str, Any] | None = None
    driver_port: int | str | None = None
    agent_ports: int | str | None = None

    def __post_init__(self) -> None:
        self._began = clock.monotonic()
        self._findings: list[Finding] = []

    def report(self) -> Report:
        return Report(tuple(self._findings), clock.monotonic() - self._began)

    def add(self, finding: Finding) -> None:
        self._findings.append(finding)

    def _check(self, name: str, check: Callable[..., Finding], *args: Any) -> None:
        """Add the finding of `check(*args)`; an exception becomes a problem and does not stop the other checks."""
        try:
            self.add(check(*args))
        except Exception as error:
            told = isinstance(error, SparkElasticError)
            says = str(error) if told else f"this could not be looked at: {type(error).__name__}: {error}"
            self.add(Finding(name, PROBLEM, says, f"docs/errors.md has {type(error).__name__}" if told else _OTHERS))

    def _left_s(self) -> float:
        """Return the seconds that the job may take."""
        return max(_OF_JOB * self.timeout_s - (clock.monotonic() - self._began), 1.0)

    # --- this machine -----------------------------------------------------------------------------

    def check_driver(self) -> None:
        """Check the driver's Python, without Spark."""
        self._check("packages", judge_driver, platform.python_version(), installed_packages())

    def check_without_spark(self, problem: str, fix: str) -> None:
        """Run the checks that need no session, and report the problem for which there is no session."""
        self._check("java", _java_here)
        self.add(Finding("Spark", PROBLEM, problem, fix))

    # --- the cluster ------------------------------------------------------------------------------

    def check_cluster(self, spark: Any) -> None:
        """Check a session and its executors with a job, and the store."""
        try:
            cluster = checked_cluster(spark)
        except Exception as error:
            self.check_without_spark(str(error), "change the session as the line above says")
            return
        try:
            self._check("java", _java_of, cluster)
            self._check("Spark", _spark_of, cluster)
            self._check("task slots", self._check_slots, cluster)
            if self._width > 0:
                self._check("workers", self._check_job, cluster)
            self._check("storage", self._check_store, cluster)
        finally:
            cluster.leave_thread()

    _width = 0
    """Workers of the job that is tried."""

    def _check_slots(self, cluster: Cluster) -> Finding:
        self._width = self.num_proc or 0
        dynamic = cluster.allocates_dynamically()
        try:
            now = cluster.slots()
        except InvalidSettingsError as error:
            level = WARNING if dynamic or self.num_proc else PROBLEM
            return Finding("task slots", level, error.message, "add executors, or name num_proc here and in jobs")
        need = self.num_proc or 1
        facts = {"total": now, "needed": self.num_proc, "dynamic_allocation": dynamic}
        says = f"{counted(now, 'task slot')}, busy or not"
        if now < need and not dynamic:
            self._width = now
            fix = f"add executors or cores, or lower num_proc to {now}; each slot takes "
            fix += f"spark.task.cpus={cluster.setting('spark.task.cpus', '1')} cores"
            return Finding("task slots", PROBLEM, f"{says}; {need} are needed", fix, facts)
        self._width = self.num_proc or min(now, MOST_WORKERS)
        return Finding("task slots", OK, says + ("; dynamic allocation may add some" if dynamic else ""), facts=facts)

    def _check_job(self, cluster: Cluster) -> Finding:
        """Run a job of one all-reduce; judge what its workers say about themselves."""
        began = clock.wall()
        job = run_async(
            look_around,
            num_proc=self._width,
            min_num_proc=self._width,
            spark=cluster,
            driver_port=self.driver_port,
            agent_ports=self.agent_ports,
            start_timeout=self._left_s(),
            verbose=0,
        )
        try:
            reports = job.result(self._left_s())
        except TimeoutError:
            status = job.status()
            says = f"the job is not done after {clock.wall() - began:.0f} s: {status.phase}; {status.waiting_for}"
            return Finding("workers", PROBLEM, says, "the executors' logs say more (stderr in Spark's UI)")
        finally:
            if not job.done():
                job.cancel("the doctor's time is over", 3.0)
        ended = clock.wall()
        self._check("versions", judge_versions, platform.python_version(), installed_packages(), reports)
        clocks = {f"rank {rank} on {report['host']}": report["clock"] for rank, report in enumerate(reports)}
        self._check("clocks", judge_clocks, clocks, began, ended)
        hosts = sorted({report["host"] for report in reports})
        says = f"{counted(len(reports), 'worker')} on {', '.join(hosts[:5])} reached the driver and one another; "
        says += f"torch sees {max(report['gpus'] for report in reports)} GPUs in each"
        return Finding("workers", OK, f"{says}; {ended - began:.1f} s", facts={"reports": reports})

    def _check_store(self, cluster: Cluster) -> Finding:
        store = Store.create(self.store, self.storage_options)
        try:
            ensure_shared(store, cluster)
        except SparkElasticError as error:
            if self.store is not None:
                raise
            fix = "name a store here and in estimators (store=...): a mounted folder, s3://, gs://, abfss://, hdfs://"
            return Finding("storage", WARNING, f"no store was named, and {error}", fix)
        return Finding("storage", OK, f"the driver and the executors see each other's files in {store.url}")


_OTHERS = "see to the other findings first, then run the doctor again"


def look_around() -> dict[str, Any]:
    """Return the facts about this worker, after an all-reduce with the others. Runs in workers."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1), name="spark_elastic doctor")
    return {
        "clock": clock.wall(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": installed_packages(),
        "gpus": torch.cuda.device_count(),
    }


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_packages() -> dict[str, str]:
    """Return the versions of those packages that matter here and are installed."""
    found = {name: installed_version(name) for name in _PACKAGES}
    found["tensorflow"] = found["tensorflow"] or installed_version("tensorflow-cpu")
    return {name: version for name, version in found.items() if version is not None}


# --- judgements ---------------------------------------------------------------------------------------


def judge_driver(python: str, packages: Mapping[str, str]) -> Finding:
    """Judge the packages of the driver."""
    facts = {"python": python, "packages": dict(packages)}
    says = f"Python {python}, " + ", ".join(f"{name} {version}" for name, version in packages.items())
    if _release(packages.get("torch", "0")) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        says = f"{says}; torch {oldest} or newer is needed"
        return Finding("packages", PROBLEM, says, f"pip install 'torch>={oldest}'", facts)
    lacking = [name for name in ("pyspark", "pandas", "pyarrow") if name not in packages]
    if lacking:
        says = f"{says}; {' and '.join(lacking)} not installed here: estimators need all three, run only pyspark"
        level = PROBLEM if "pyspark" in lacking else WARNING
        return Finding("packages", level, says, "pip install 'spark-elastic[spark]'", facts)
    return Finding("packages", OK, says, facts=facts)


def judge_versions(python: str, packages: Mapping[str, str], reports: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare Python and the packages of workers with those of the driver."""
    own = {"python": python, **packages}
    differ: dict[str, str] = {}
    for report in reports:
        theirs = {"python": report["python"], **report["packages"]}
        for name, version in own.items():
            other = theirs.get(name)
            if other is None or _release(other) != _release(version):
                differ.setdefault(name, f"{name} is {other or 'missing'} on {report['host']} and {version} here")
    facts = {"driver": own, "workers": [dict(report["packages"]) for report in reports]}
    if not differ:
        return Finding("versions", OK, "Python and the packages of workers are those of the driver", facts=facts)
    level = PROBLEM if "spark-elastic" in differ else WARNING
    fix = f"use one environment for the driver and all executors ({reports[0]['executable']} there)"
    return Finding("versions", level, "; ".join(differ.values()), fix, facts)


def judge_clocks(clocks: Mapping[str, float], began: float, ended: float) -> Finding:
    """Compare the clocks of workers after an all-reduce with one another, and with the time that it can have been.

    All times are seconds since the epoch; `began` and `ended` are the driver's, before and after the job.
    """
    middle = sorted(clocks.values())[len(clocks) // 2]
    # workers tell their time just after the all-reduce, so all of them at nearly the same moment
    off = {name: max(abs(at - middle), began - at, at - ended, 0.0) for name, at in clocks.items()}
    name, worst = max(off.items(), key=lambda each: each[1])
    facts = {"off_s": off}
    if worst < SKEW_WARNING_S:
        return Finding("clocks", OK, f"the workers' clocks agree within {worst * 1000:.0f} ms", facts=facts)
    level = PROBLEM if worst >= SKEW_PROBLEM_S else WARNING
    fix = "let NTP or chrony set the clocks of all machines: logs and checkpoints are compared by time"
    return Finding("clocks", level, f"the clock of {name} is off by {worst:.1f} s", fix, facts)


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor version: (2, 6) for "2.6.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


# --- Java and the session -----------------------------------------------------------------------------


def _java_here() -> Finding:
    """Find the Java that a new session on this machine would start with."""
    try:
        path = check_java()
    except JavaNotFoundError as error:
        says, _, fix = str(error).partition(". ")
        return Finding("java", PROBLEM, says, fix or "install Java 17 or newer, or let JAVA_HOME name one")
    return Finding("java", OK, f"{path}; JAVA_HOME is {os.environ.get('JAVA_HOME') or 'not set'}")


def _java_of(cluster: Cluster) -> Finding:
    java = cluster.java()
    if java is None:
        return Finding("java", OK, "the JVM is the Spark Connect server's; it is not seen from here")
    version, home = java
    return Finding("java", OK, f"Java {version} at {home}", facts={"version": version, "home": home})


def _spark_of(cluster: Cluster) -> Finding:
    facts = {"version": cluster.version, "master": cluster.master, "application": cluster.application}
    where = "through Spark Connect" if cluster.remote else f"on {cluster.master}, {cluster.application}"
    return Finding("Spark", OK, f"Spark {cluster.version} {where}", facts=facts)
