"""One check-up: what jobs use is tried as jobs use it, within one deadline. An error of a check becomes a finding."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from spark_elastic import clock
from spark_elastic.data.shared_store import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, Report
from spark_elastic.errors import InvalidSettingsError, JavaNotFoundError, SparkElasticError
from spark_elastic.jobs.run import run_async
from spark_elastic.membership.reasons import counted
from spark_elastic.redaction import first_line
from spark_elastic.settings import whole_number
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.java import check_java
from spark_elastic.spark.session import checked_cluster
from spark_elastic.wire.ports import valid_ports

MOST_WORKERS = 32  # workers of the job that is tried if `num_proc` is not given
SKEW_WARNING_S = 1.0
SKEW_PROBLEM_S = 60.0
OLDEST_TORCH = (2, 6)
_OF_JOB = 0.75  # the part of the time limit in which the job has to be done; the rest is to end it, and for the store
_PACKAGES = ("spark-elastic", "torch", "numpy", "cloudpickle", "pyspark", "pandas", "pyarrow", "tensorflow", "keras")


@dataclass(eq=False)
class Examination:
    """One check-up of a driver and its cluster. The settings are those of `doctor`, and so are the errors."""

    timeout: float
    num_proc: int | None = None
    store: Any = None
    storage_options: Mapping[str, Any] | None = None
    driver_port: int | str | None = None
    agent_ports: int | str | None = None

    def __post_init__(self) -> None:
        if self.num_proc is not None:
            self.num_proc = whole_number("num_proc", self.num_proc, at_least=1)
        seconds = self.timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= 3600:
            raise InvalidSettingsError(f"timeout must be a number of seconds from 1 to 3600, not {seconds!r}")
        for name, value in (("driver_port", self.driver_port), ("agent_ports", self.agent_ports)):
            if value is not None:
                valid_ports(name, value)
        self._began = clock.monotonic()
        self._findings: list[Finding] = []
        self._width = 0  # workers of the job that is tried

    def report(self) -> Report:
        return Report(tuple(self._findings), clock.monotonic() - self._began)

    def run(self, session: AbstractContextManager[Any], where: str, option: str) -> threading.Thread:
        """Examine what `session`, the one at `where`, yields in time; return the thread, which may be closing it."""
        opened, over = threading.Event(), threading.Event()

        def examine() -> None:
            try:
                self._check("packages", judge_driver, platform.python_version(), installed_packages())
                with contextlib.ExitStack() as closing:
                    try:
                        spark = closing.enter_context(session)
                    except SparkElasticError as error:
                        self._without_session(f"no session: {error}", "see the lines above, and Spark's own messages")
                        return
                    except Exception as error:  # of Spark's JVM, which has said more on stderr
                        fix = f"check {option} and --conf, and Spark's own messages on stderr"
                        self._without_session(f"no session on {where}: {first_line(error)}", fix)
                        return
                    opened.set()
                    self._check_cluster(spark)
                    over.set()  # before the session is closed
            finally:
                over.set()

        # on a thread: a hanging JVM answers none of the calls that have no timeout
        thread = threading.Thread(target=examine, name="spark_elastic doctor", daemon=True)
        thread.start()
        if not over.wait(self.timeout + 2.0):
            if opened.is_set():
                problem = f"the checkup did not end within {self.timeout:.0f} s"
                fix = "give it more time; if Spark's driver JVM hangs, look at its thread dump (jstack) and log"
                self._findings.append(Finding("deadline", PROBLEM, problem, fix))
            else:
                problem = f"no session on {where} within {self.timeout:.0f} s"
                self._without_session(problem, "check that the master answers there; Spark says more on stderr")
        return thread

    def _check(self, name: str, check: Callable[..., Finding], *args: Any) -> None:
        """Add the finding of `check(*args)`; an exception becomes a problem and does not stop the other checks."""
        try:
            self._findings.append(check(*args))
        except Exception as error:
            told = isinstance(error, SparkElasticError)
            says = str(error) if told else f"this could not be looked at: {type(error).__name__}: {error}"
            others = "see to the other findings first, then run the doctor again"
            fix = f"docs/errors.md has {type(error).__name__}" if told else others
            self._findings.append(Finding(name, PROBLEM, says, fix))

    def _without_session(self, problem: str, fix: str) -> None:
        """Check Java, and report the problem because of which there is no session."""
        self._check("java", _java_here)
        self._findings.append(Finding("Spark", PROBLEM, problem, fix))

    def _check_cluster(self, spark: Any) -> None:
        try:
            cluster = checked_cluster(spark)
        except Exception as error:
            self._without_session(str(error), "change the session as the line above says")
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
        until = self._began + _OF_JOB * self.timeout
        job = run_async(
            look_around,
            num_proc=self._width,
            min_num_proc=self._width,
            spark=cluster,
            driver_port=self.driver_port,
            agent_ports=self.agent_ports,
            start_timeout=max(until - clock.monotonic(), 1.0),
            verbose=0,
        )
        try:
            reports = job.result(max(until - clock.monotonic(), 1.0))
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
        return Finding("packages", level, says, "install spark-elastic with the extra [spark]", facts)
    if _release(packages["pyspark"]) >= (4, 1) and _release(packages["pandas"]) < (2, 2):
        says = f"{says}; Spark {packages['pyspark']} needs pandas 2.2 or newer"
        return Finding("packages", PROBLEM, says, "pip install 'pandas>=2.2,<3'", facts)
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
    """Compare the clocks of workers after an all-reduce with one another, and with the begin and end of the job."""
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


def _java_here() -> Finding:
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
