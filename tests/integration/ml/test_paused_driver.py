"""A driver that comes back from a pause longer than its lease writes and deletes nothing that is another driver's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoints import Checkpoints
from tests.integration.processes import children, wait_until

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0


class Driver:
    """One of the drivers of a run: a process that can be stopped alone, without its worker."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        with (folder / f"log-{name}").open("wb") as log:
            command = [sys.executable, "-m", "tests.integration.ml.paused_fit", str(folder), name]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def log(self) -> str:
        return (self.folder / f"log-{self.name}").read_text()[-3000:]

    def wait_for_a_checkpoint(self, token: int) -> None:
        """Wait until the run has a complete checkpoint with the token of this driver."""

        def there() -> bool:
            assert self.process.poll() is None, self.log()
            checkpoints = Checkpoints(Store.create(self.folder / "runs/one/checkpoints"))
            return any(facts.token == token for facts in checkpoints.complete())

        wait_until(there, WAIT_S, f"a checkpoint of the driver {self.name}")

    def outcome(self) -> dict[str, Any]:
        """Wait for the end of the driver and all of its workers, and return what it has written."""
        self.process.wait(WAIT_S)
        path = self.folder / f"outcome-{self.name}"
        assert path.exists(), self.log()
        return dict(json.loads(path.read_text()))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    def start(name: str) -> Driver:
        started.append(Driver(tmp_path, name))
        return started[-1]

    yield start
    for driver in started:
        if driver.process.poll() is None:
            for each in [*children(driver.process.pid), driver.process.pid]:
                os.kill(each, signal.SIGKILL)
        driver.process.wait(WAIT_S)


def contents_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the contents and the time of the last change of each file and folder below."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def test_driver_that_was_paused_finds_the_run_taken_and_touches_nothing(start: Any, tmp_path: Path) -> None:
    """Its worker goes on without it until the run is taken over, and then stops by itself."""
    first = start("first")
    first.wait_for_a_checkpoint(token=1)
    first.process.send_signal(signal.SIGSTOP)
    second = start("second")
    second.wait_for_a_checkpoint(token=2)
    (tmp_path / "finish-second").touch()
    assert "epochs" in second.outcome()
    before = contents_of(tmp_path / "runs/one")
    assert "model.pt" in before
    first.process.send_signal(signal.SIGCONT)
    outcome = first.outcome()
    assert outcome.get("type") == "RunTakenError", outcome
    assert "stops so that it overwrites nothing" in outcome["error"]
    assert contents_of(tmp_path / "runs/one") == before
