"""A driver that comes back from a pause longer than its lease writes and deletes nothing that is another driver's."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.data.store import Store
from spark_elastic.ml.checkpoints import Checkpoints
from tests.integration.processes import children, wait_until

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0


class Drivers:
    """Drivers of one run, by name: processes that can be stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.integration.ml.paused_fit", str(self.folder), name]
        with (self.folder / f"log-{name}").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._processes[name].pid, number)

    def outcome(self, name: str) -> dict[str, Any]:
        """Wait for the end of a driver and all of its workers, and return what it has written."""
        process = self._processes[name]
        process.wait(WAIT_S)
        path = self.folder / f"outcome-{name}"
        assert path.exists(), self.log(name)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def log(self, name: str) -> str:
        return (self.folder / f"log-{name}").read_text()[-3000:]

    def tokens(self) -> dict[int, int]:
        """Return how many complete checkpoints the run has, by the token of their driver."""
        found: dict[int, int] = {}
        for facts in Checkpoints(Store.create(self.folder / "runs/one/checkpoints")).complete():
            found[facts.token] = found.get(facts.token, 0) + 1
        return found

    def wait_for_checkpoints(self, token: int, name: str) -> None:
        def there() -> bool:
            assert self._processes[name].poll() is None, self.log(name)
            return self.tokens().get(token, 0) > 0

        wait_until(there, WAIT_S, f"a checkpoint of the driver {name}")

    def finish(self, name: str) -> dict[str, Any]:
        (self.folder / f"finish-{name}").touch()
        return self.outcome(name)

    def end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                for each in [*children(process.pid), process.pid]:
                    os.kill(each, signal.SIGKILL)
            process.wait(WAIT_S)


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Drivers]:
    made = Drivers(tmp_path)
    yield made
    made.end()


def contents_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the checksum and the time of the last change of each file and folder below."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


def test_driver_that_was_paused_finds_the_run_taken_and_touches_nothing(drivers: Drivers) -> None:
    """Its worker goes on without it until the run is taken over, and then stops by itself."""
    run = drivers.folder / "runs/one"
    drivers.start("first")
    drivers.wait_for_checkpoints(1, "first")
    drivers.signal("first", signal.SIGSTOP)
    drivers.start("second")
    drivers.wait_for_checkpoints(2, "second")
    assert "epochs" in drivers.finish("second")
    before = contents_of(run)
    assert "model.pt" in before
    drivers.signal("first", signal.SIGCONT)
    outcome = drivers.outcome("first")
    assert outcome.get("type") == "RunTakenError", outcome
    assert "stops so that it overwrites nothing" in outcome["error"]
    assert contents_of(run) == before
