"""Real Spark clusters on this machine, for tests and benchmarks. One at a time in a process, one a test module.

::

    with standalone(workers=2, cores=1) as cluster:
        cluster.sc ...
        cluster.kill_executor("0")
        cluster.add_worker()

Leaving the block stops everything and raises AssertionError if a process that the cluster started (an executor, a
Python worker, or anything below them) is still there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from tests.integration.network import Network
from tests.integration.processes import MARK, assert_gone, children, marked, wait_until, waits_for_a_jvm

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
_EXECUTOR_ID = re.compile(r"ExecutorBackend .*--executor-id (\S+)")
_MASTER_PORT = r"Successfully started service 'sparkMaster' on port (\d+)"
# Small, quick to start, and content with 2 cores under load.
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
TASKS_END_S = 10.0
"""The longest wait for tasks of jobs that are over. Spark kills them within some seconds."""

_QUICK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.executor.memory": "600m",
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
    "spark.executor.heartbeatInterval": "2s",
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "3s",
    "spark.sql.warehouse.dir": "/tmp/spark_elastic-warehouse",
}

# The Worker needs the timeout too: it sends its heartbeats four times as often.
_WORKER_TIMEOUT = "-Dspark.worker.timeout=8"
_PREFER_IPV6 = "-Djava.net.preferIPv6Addresses=true"

_process_mark = uuid.uuid4().hex


def _environment(mark: str) -> dict[str, str]:
    paths = [str(ROOT), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ROOT))]
    return {
        "SPARK_HOME": str(SPARK_HOME),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{_JAVA_OPTIONS} {_WORKER_TIMEOUT}",
        MARK: mark,
    }


def _start_driver_jvm() -> int:
    """Start the JVM behind pyspark, one per process, and return its pid.

    Started without settings: those of the first session would become its system properties and with that the
    defaults of every later session in the process.
    """
    if SparkContext._gateway is None:
        os.environ.update(_environment(_process_mark))
        SparkContext._ensure_initialized()
    return int(SparkContext._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]


class Cluster:
    """A SparkSession and the processes behind it."""

    def __init__(self, kind: str, master: str, settings: dict[str, str], driver_host: str = "127.0.0.1") -> None:
        self.kind = kind
        self.driver_jvm = _start_driver_jvm()
        conf = SparkConf(loadDefaults=False)
        for key, value in {**_QUICK, "spark.driver.host": driver_host, **settings}.items():
            conf.set(key, value)
        conf.setMaster(master).setAppName(f"spark_elastic tests on {kind}")
        self.spark: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
        self.sc: SparkContext = self.spark.sparkContext
        self.sc.setLogLevel("ERROR")
        self._application = str(self.sc.applicationId)  # asked for now: a test may stop the session itself

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def processes(self) -> dict[int, str]:
        """Return pid → command line of the cluster's processes, without this process and its JVM."""
        found = marked(_process_mark)
        # A spawned child of the test process itself carries the mark too, and is not the cluster's; nor is what Python
        # itself keeps beside a process that has spawned others, for as long as that lives.
        own = {os.getpid(), self.driver_jvm, getattr(resource_tracker._resource_tracker, "_pid", None)}
        return {pid: command for pid, command in found.items() if pid not in own}

    def executors(self) -> dict[str, int]:
        """Executor id → pid of its JVM. Empty in local mode."""
        found = {}
        for pid, command in self.processes().items():
            if match := _EXECUTOR_ID.search(command):
                found[match.group(1)] = pid
        return found

    def python_processes(self, executor: str) -> list[int]:
        """Everything below the executor's JVM: Spark's Python daemon, the tasks, and what they started."""
        return children(self.executors()[executor])

    def wait_for_executors(self, count: int, timeout_s: float = 60.0) -> None:
        backend = self.sc._jsc.sc()
        wait_until(lambda: backend.getExecutorIds().size() >= count, timeout_s, f"{count} executors")

    def kill_executor(self, executor: str) -> int:
        """kill -9 of the executor's JVM; returns the pid."""
        pid = self.executors()[executor]
        os.kill(pid, signal.SIGKILL)
        return pid

    def _no_task_runs(self) -> bool:
        return all(each.activeTasks() == 0 for each in self._executor_summaries())

    def _executor_summaries(self) -> list[Any]:
        found = self.sc._jsc.sc().statusStore().executorList(True)
        return [found.apply(index) for index in range(found.size())]

    def stop(self) -> None:
        # Spark ends its Python daemons as it stops. A task that runs longer, such as one of a job that has failed, may
        # make a new daemon in a JVM that lives on, and nothing ends that one.
        with contextlib.suppress(Exception):  # a test may have stopped the session itself
            wait_until(self._no_task_runs, TASKS_END_S, "no task runs")
        self.spark.stop()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes(), 5.0, "all processes have ended")
        for pid, command in self.processes().items():
            if waits_for_a_jvm(pid, command):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert_gone(self.processes, 10.0)
        # local-cluster leaves its executors' folders inside the installed package; SPARK_WORKER_DIR does not reach it.
        shutil.rmtree(SPARK_HOME / "work" / self._application, ignore_errors=True)


class Standalone(Cluster):
    """A Master and Workers as `spark-class` starts them, on loopback addresses or in network namespaces."""

    def __init__(
        self,
        workers: int,
        cores: int,
        settings: dict[str, str],
        *,
        network: Network | None = None,
        decommission: bool = False,
        wait_for: int | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._network = network
        self._cores = cores
        self._directory = Path(tempfile.mkdtemp(prefix="spark_elastic-standalone-"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self._worker_hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._decommission = decommission
        host = self._in_brackets(network.gateway) if network is not None else "127.0.0.1"
        self._options = _PREFER_IPV6 if network is not None and network.ipv6 else ""
        if self._options:
            settings = {"spark.executor.extraJavaOptions": f"{_JAVA_OPTIONS} {self._options}", **settings}
        try:
            # it chooses its port itself: one that was free before its JVM is up may be anybody's by then
            arguments = ["--host", host, "--port", "0", "--webui-port", "0"]
            self._daemon("master", "org.apache.spark.deploy.master.Master", arguments)
            self.master_url = f"spark://{host}:{self._wait_for_log('master', _MASTER_PORT)[1]}"
            for _ in range(workers):
                self._start_worker()
            for name in list(self._worker_hosts):
                self._wait_for_worker(name)
            if decommission:
                settings = {"spark.decommission.enabled": "true", **settings}
            kind = "standalone" if network is None else "standalone in namespaces"
            super().__init__(kind, self.master_url, {"spark.executor.cores": str(cores), **settings}, host)
            self.wait_for_executors(workers if wait_for is None else wait_for)
        except BaseException:
            self._end_daemons()
            raise

    def add_worker(self) -> str:
        """One more Worker on a host of its own; returns the host's address once it is registered."""
        host = self._start_worker()
        self._wait_for_worker(host)
        return host

    def worker_hosts(self) -> list[str]:
        return list(self._worker_hosts)

    def decommission(self, host: str) -> None:
        """SIGPWR to the host's Worker: it announces that it will go."""
        self._worker_hosts[host].send_signal(signal.SIGPWR)

    def kill_worker(self, host: str) -> None:
        """kill -9 of the host's Worker daemon; its executor notices and ends."""
        self._worker_hosts[host].kill()

    def link_down(self, host: str) -> None:
        assert self._network is not None, "only hosts in namespaces have a link"
        self._network.link_down(host)

    def link_up(self, host: str) -> None:
        assert self._network is not None, "only hosts in namespaces have a link"
        self._network.link_up(host)

    def processes(self) -> dict[int, str]:
        daemons = {daemon.pid for daemon in self._daemons}
        return {**super().processes(), **{p: c for p, c in marked(self._mark).items() if p not in daemons}}

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._end_daemons()
        assert_gone(lambda: marked(self._mark), 10.0)
        shutil.rmtree(self._directory, ignore_errors=True)  # again: an executor may have written while it ended

    def _start_worker(self) -> str:
        number = len(self._worker_hosts) + 2
        host = self._network.add_host() if self._network is not None else f"127.0.0.{number}"
        options = f"-Dspark.decommission.enabled={str(self._decommission).lower()}"
        arguments = [
            "--host",
            self._in_brackets(host),
            "--cores",
            str(self._cores),
            "--memory",
            "2g",
            "--webui-port",
            "0",
        ]
        arguments += ["--work-dir", str(self._directory / host), self.master_url]
        self._worker_hosts[host] = self._daemon(
            host,
            "org.apache.spark.deploy.worker.Worker",
            arguments,
            before=self._network.command_on(host) if self._network is not None else [],
            environment={"SPARK_WORKER_OPTS": options},
        )
        return host

    def _daemon(
        self,
        name: str,
        java_class: str,
        arguments: list[str],
        *,
        before: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        out = (self._directory / f"{name}.log").open("wb")
        self._logs.append(out)
        daemon = subprocess.Popen(
            [*(before or []), str(SPARK_HOME / "bin" / "spark-class"), java_class, *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **_environment(self._mark),
                "SPARK_DAEMON_JAVA_OPTS": f"{_JAVA_OPTIONS} {_WORKER_TIMEOUT} {self._options}".strip(),
                **(environment or {}),
            },
            start_new_session=True,  # a Ctrl-C in the terminal is for pytest alone
        )
        self._daemons.append(daemon)
        return daemon

    @staticmethod
    def _in_brackets(host: str) -> str:
        return f"[{host}]" if ":" in host else host

    def _wait_for_worker(self, host: str) -> None:
        self._wait_for_log(host, "Successfully registered with master")

    def _wait_for_log(self, name: str, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        path = self._directory / f"{name}.log"
        found = lambda: re.search(pattern, path.read_text(errors="replace"))  # noqa: E731
        try:
            wait_until(found, timeout_s, f"{name} is up")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log ends:\n{path.read_text(errors='replace')[-2000:]}") from None
        match = found()
        assert match is not None
        return match

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):  # the Workers first: each ends its executors
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5.0)
        for out in self._logs:
            out.close()
        if self._network is not None:
            self._network.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def local(threads: int = 4, **settings: str) -> Cluster:
    """`local[threads]`: driver, executor and tasks on one JVM."""
    return Cluster("local", f"local[{threads}]", _dotted(settings))


def local_cluster(workers: int = 2, cores: int = 2, memory_mb: int = 1024, **settings: str) -> Cluster:
    """`local-cluster[workers,cores,memory_mb]`: one executor JVM per worker, all on this machine's address."""
    cluster = Cluster("local-cluster", f"local-cluster[{workers},{cores},{memory_mb}]", _dotted(settings))
    cluster.wait_for_executors(workers)
    return cluster


def standalone(workers: int = 2, cores: int = 1, *, decommission: bool = False, **settings: str) -> Standalone:
    """A Master on 127.0.0.1 and Workers on 127.0.0.2, .3, …; one executor each."""
    return Standalone(workers, cores, _dotted(settings), decommission=decommission)


def namespaced(
    workers: int = 2, cores: int = 1, *, decommission: bool = False, network: Network | None = None, **settings: str
) -> Standalone:
    """Start a standalone cluster, each Worker in a separate network namespace. See `network.why_unavailable` first.

    An IPv6 `network` needs a driver JVM that prefers IPv6: a process of its own, with `SPARK_PREFER_IPV6` and
    `SPARK_SUBMIT_OPTS` set before it imports pyspark.
    """
    network = network or Network()
    return Standalone(workers, cores, _dotted(settings), network=network, decommission=decommission)


def _dotted(settings: dict[str, str]) -> dict[str, str]:
    """`spark_task_cpus="2"` means spark.task.cpus; keys that have a dot stay."""
    return {key if "." in key else key.replace("_", "."): value for key, value in settings.items()}


def module_fixture(make: Callable[..., Cluster], *args: Any, **settings: Any) -> Any:
    """Return a fixture, to be called `cluster`, of one cluster for all tests of a module."""
    import pytest  # benchmarks run where it is not installed

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Cluster]:
        with make(*args, **settings) as running:
            yield running

    return cluster
