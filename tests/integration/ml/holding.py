"""Workers and tasks that stand still at a moment of a fit until a test has killed somebody there."""

from __future__ import annotations

import os
from pathlib import Path

from spark_elastic.ml.callbacks import Callback, Run
from tests.integration.processes import wait_until


class Hold:
    """Whoever comes first says who it is, and stands until `release`. A folder that all processes see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stand(self) -> None:
        if self.released():
            return
        unfinished = self.folder / f"{os.getpid()}.unfinished"
        unfinished.write_text(str(os.getpid()))
        unfinished.replace(self.folder / f"{os.getpid()}.here")
        wait_until(self.released, 120, "the test has killed somebody")

    def released(self) -> bool:
        return (self.folder / "released").exists()

    def release(self) -> None:
        (self.folder / "released").touch()

    def wait_for(self, count: int = 1) -> list[int]:
        """The pids of those who stand, once there are so many."""
        wait_until(lambda: len(list(self.folder.glob("*.here"))) >= count, 120, f"{count} processes stand")
        return [int(path.stem) for path in self.folder.glob("*.here")]


class HoldingCallback(Callback):
    """Stands at one event: in rank 0, or in all workers."""

    def __init__(self, hold: Hold, event: str, step: int, everybody: bool = False) -> None:
        self.hold, self.event, self.step, self.everybody = hold, event, step, everybody

    def _at(self, event: str, run: Run) -> None:
        if event == self.event and run.step >= self.step and (self.everybody or run.rank == 0):
            self.hold.stand()

    def on_batch_end(self, run: Run) -> None:
        self._at("on_batch_end", run)

    def on_fit_end(self, run: Run) -> None:
        self._at("on_fit_end", run)


class StepLog(Callback):
    """Appends the number of each step that rank 0 has applied."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_batch_end(self, run: Run) -> None:
        if run.rank == 0:
            with self.path.open("a") as file:
                file.write(f"{run.step}\n")
