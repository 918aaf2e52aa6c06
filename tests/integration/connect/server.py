"""Real Spark Connect servers on this machine: `start-connect-server` in local mode or on a standalone cluster.

::

    with ConnectServer("local[4]") as server:
        server.session() ...

Leaving the block stops everything and raises AssertionError if a process that it started is still there.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyspark

from tests.integration.processes import MARK, assert_gone, children, marked, wait_until

ROOT = Path(__file__).resolve().parents[3]
SPARK_HOME = Path(pyspark.__file__).parent
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
_PORT = r"Spark Connect server started at: \S*:(\d+)\s"
_MASTER_PORT = r"Successfully started service 'sparkMaster' on port (\d+)"
_EXECUTOR_ID = re.compile(r"ExecutorBackend .*--executor-id (\S+)")
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.connect.grpc.binding.port": "0",
    "spark.executor.memory": "600m",
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
    "spark.executor.heartbeatInterval": "2s",
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "3s",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}


class ConnectServer:
    """A Spark Connect server on `master`, or on a standalone cluster of `workers` with `cores` each. Its tasks run
    `python` and find spark_elastic in PYTHONPATH if `package` is set, or get `paths` as PYTHONPATH instead.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        workers: int = 0,
        cores: int = 1,
        settings: dict[str, str] | None = None,
        package: bool = True,
        python: str = sys.executable,
        paths: Sequence[Path] | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="spark_elastic-connect-"))
        self._python = python
        self._paths = paths or [ROOT if package else SPARK_HOME.parent]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._sessions: list[Any] = []
        try:
            if master is None:
                arguments = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
                self._spark_class("master", "org.apache.spark.deploy.master.Master", arguments)
                master = f"spark://127.0.0.1:{self._wait_for_log('master', _MASTER_PORT)}"
            self.master = master
            for number in range(workers):
                self.add_worker(f"127.0.0.{number + 2}", cores)
            conf = {**_SETTINGS, **(settings or {})}
            arguments = ["--master", master, *(word for item in conf.items() for word in ("--conf", "=".join(item)))]
            arguments += ["--driver-java-options", _JAVA_OPTIONS, "--class"]
            arguments += ["org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
            self.process = self._start("server", [str(SPARK_HOME / "bin/spark-submit"), *arguments])
            self.port = int(self._wait_for_log("server", _PORT))
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"sc://localhost:{self.port}"

    def __enter__(self) -> ConnectServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def session(self) -> Any:
        """Return a new session. It does not become this process's default one."""
        from pyspark.sql.connect.session import SparkSession

        session = SparkSession.builder.remote(self.url).create()
        self._sessions.append(session)
        return session

    def add_worker(self, host: str, cores: int) -> None:
        arguments = ["--host", host, "--cores", str(cores), "--memory", "2g", "--webui-port", "0"]
        arguments += ["--work-dir", str(self.folder / host), self.master]
        self._spark_class(host, "org.apache.spark.deploy.worker.Worker", arguments)
        self._wait_for_log(host, "(Successfully registered with master)")

    def processes(self) -> dict[int, str]:
        """Return pid → command line of everything that was started."""
        return marked(self._mark)

    def workers(self) -> dict[int, str]:
        """Return the training processes."""
        return {pid: command for pid, command in self.processes().items() if "spark_elastic.task" in command}

    def executors(self) -> dict[str, int]:
        """Executor id → pid of its JVM."""
        found = ((_EXECUTOR_ID.search(command), pid) for pid, command in self.processes().items())
        return {match.group(1): pid for match, pid in found if match}

    def executor_of(self, pid: int) -> str:
        """Return the executor that a process is below."""
        return next(name for name, jvm in self.executors().items() if pid in children(jvm))

    def kill_server(self) -> None:
        """kill -9 of the server's JVM."""
        os.kill(self.process.pid, signal.SIGKILL)  # spark-submit has replaced itself with java
        self.process.wait()

    def stop(self) -> None:
        for session in self._sessions:
            if self.process.poll() is not None:  # PySpark would look for it for ten minutes as this process ends
                atexit.unregister(getattr(session.client, "_on_exit", session.stop))
            elif not session.is_stopped:
                session.stop()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        assert_gone(self.processes, 10.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spark_class(self, name: str, main: str, arguments: list[str]) -> None:
        self._start(name, [str(SPARK_HOME / "bin/spark-class"), main, *arguments])

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": self._python,
            "PYTHONPATH": os.pathsep.join(map(str, self._paths)),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "768m" if name == "server" else "256m",
            "SPARK_DAEMON_JAVA_OPTS": _JAVA_OPTIONS,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            MARK: self._mark,
        }
        for name_of_remote in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE"):
            environment.pop(name_of_remote, None)
        with (self.folder / f"{name}.log").open("wb") as log:
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        self._daemons.append(daemon)
        return daemon

    def _wait_for_log(self, name: str, pattern: str) -> str:
        log = self.folder / f"{name}.log"
        found: list[str] = []

        def logged() -> bool:
            assert self._daemons[-1].poll() is None, f"{name} ended: {log.read_text()[-2000:]}"
            match = re.search(pattern, log.read_text(errors="replace"))
            if match:
                found.append(match.group(1))
            return bool(found)

        wait_until(logged, 90.0, f"{name} has started")
        return found[0]
