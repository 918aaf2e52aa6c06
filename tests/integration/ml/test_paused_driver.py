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
from spark_elastic.runs.checkpoints import CheckpointFacts, Checkpoints, Contents, name_of
from spark_elastic.runs.lease import BEAT_S, LEASE_S
from tests.integration.processes import children, wait_until

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 240.0
SHORT = (0.4, 2.4)
"""Seconds between heartbeats and of a lease, in the proportion of the real ones."""


class Drivers:
    """Drivers of one run, by name: processes that can be stopped, together with their workers or alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, beat_s: float, lease_s: float, **settings: Any) -> None:
        command = [sys.executable, "-m", "tests.integration.ml.paused_fit", str(self.folder), name]
        with (self.folder / f"log-{name}").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*command, str(beat_s), str(lease_s), json.dumps(settings)], cwd=ROOT, stdout=log, stderr=log
            )

    def signal(self, name: str, number: signal.Signals, workers: bool) -> None:
        pid = self._processes[name].pid
        for each in [pid, *(children(pid) if workers else [])]:
            os.kill(each, number)

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


CLEAR = (
    "this driver's lease on the run in .* was taken over by the driver with pid .*; this driver sent no heartbeat for "
    "more than .* s .*and stops so that it overwrites nothing"
)


def assert_given_up(outcome: dict[str, Any]) -> None:
    assert outcome.get("type") == "RunTakenError", outcome
    with pytest.raises(AssertionError, match=CLEAR):
        raise AssertionError(outcome["error"])
    assert "\n" not in outcome["error"]


@pytest.mark.parametrize(
    ("beat_s", "lease_s"),
    [
        pytest.param(*SHORT, id="short"),
        pytest.param(BEAT_S, LEASE_S, id="as long as it is", marks=pytest.mark.soak),
    ],
)
def test_driver_that_was_paused_finds_the_run_taken_and_touches_nothing(
    drivers: Drivers, beat_s: float, lease_s: float
) -> None:
    """Its worker goes on without it until the run is taken over, and then stops by itself."""
    run = drivers.folder / "runs/one"
    drivers.start("first", beat_s, lease_s)
    drivers.wait_for_checkpoints(1, "first")
    drivers.signal("first", signal.SIGSTOP, workers=False)
    drivers.start("second", beat_s, lease_s)
    drivers.wait_for_checkpoints(2, "second")
    assert "epochs" in drivers.finish("second")
    before = contents_of(run)
    assert "model.pt" in before
    drivers.signal("first", signal.SIGCONT, workers=False)
    assert_given_up(drivers.outcome("first"))
    assert contents_of(run) == before


@pytest.mark.soak
def test_driver_that_was_paused_with_its_worker_does_not_disturb_the_one_that_trains(drivers: Drivers) -> None:
    drivers.start("first", *SHORT)
    drivers.wait_for_checkpoints(1, "first")
    drivers.signal("first", signal.SIGSTOP, workers=True)
    drivers.start("second", *SHORT)
    drivers.wait_for_checkpoints(2, "second")
    drivers.signal("first", signal.SIGCONT, workers=True)
    assert_given_up(drivers.outcome("first"))
    wait_until(lambda: drivers.tokens() == {2: 3}, WAIT_S, "all checkpoints are the second driver's")
    assert "epochs" in drivers.finish("second")


@pytest.mark.soak
def test_driver_that_was_paused_as_it_cleared_the_run_deletes_nothing_of_the_next(drivers: Drivers) -> None:
    run = Store.create(drivers.folder / "runs/one")
    for number in (1, 2, 3):
        facts = CheckpointFacts(name_of(number, 1), number, 0, number, (), 1)
        Checkpoints(run.sub("checkpoints")).write(Contents(facts, {}, {"state.pt": b"of an earlier run"}))
    run.write_bytes("run.json", b"{}")
    drivers.start("first", *SHORT, resume=False, stop_at=("os.remove", "checkpoint.json"))
    wait_until((drivers.folder / "stopped").exists, WAIT_S, "the first driver stops itself")
    drivers.start("second", *SHORT, resume=False)
    drivers.wait_for_checkpoints(3, "second")
    assert "epochs" in drivers.finish("second")
    before = contents_of(run.local_path())
    assert "model.pt" in before
    drivers.signal("first", signal.SIGCONT, workers=False)
    assert_given_up(drivers.outcome("first"))
    assert contents_of(run.local_path()) == before
