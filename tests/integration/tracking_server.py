"""A real MLflow tracking server on loopback, with an SQLite file and a folder for artifacts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.processes import wait_until


class TrackingServer:
    """The server's process, which can be stopped and started again at the same address with the same runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/runs.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=self.folder, start_new_session=True
            )
        wait_until(self._answers, 120, f"the tracking server answers; its log is in {self.folder}/server.log")

    def stop(self) -> None:
        """End the server and the processes that it started, which are a group of their own."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def tracking_server(folder: Path) -> Iterator[TrackingServer]:
    """Run a server for the block."""
    server = TrackingServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
