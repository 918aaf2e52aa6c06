"""TensorBoardCallback: write a fit's epochs and changes of the workers for TensorBoard, from the driver."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.driver_callbacks import DriverResult, DriverRun
from spark_elastic.redaction import redacted
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import FACTS, Row
from spark_elastic.trackers.fits import FitsCallback

log = logging.getLogger("spark_elastic.tensorboard")

_URI = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+:/|file:")


class TensorBoardCallback(FitsCallback):
    """Writes loss and metrics of each epoch, the number of workers, and the changes of the workers as text.

    Each fit gets a folder below `log_dir`, which TensorBoard shows as a run: with the `run_id` of the fit as its name,
    so that a resumed training continues its curves, or else with the time.

    Args:
        log_dir: Folder of the driver's machine; only the driver writes.
        run_name: Name of the fit's folder.

    Raises:
        MissingExtraError: tensorboard is not installed (extra `tensorboard`).
        InvalidSettingsError: log_dir is a URI.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, run_name: str | None = None) -> None:
        super().__init__("tensorboard")
        if _URI.match(os.fspath(log_dir)):
            raise InvalidSettingsError(
                f"log_dir must be a folder of the driver's machine, not the URI {os.fspath(log_dir)!r}; write to a "
                "folder, mounted or copied afterwards"
            )
        self.log_dir = Path(log_dir)
        self.run_name = run_name

    def on_fit_start(self, run: DriverRun) -> None:
        name = self.run_name or run.run_id or datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
        try:
            fit = _TensorBoardFit(self.log_dir / name, run)
        except OSError as error:
            raise InvalidSettingsError(
                f"TensorBoardCallback cannot write to {self.log_dir / name}: {error}; give a log_dir that this program "
                "may write to"
            ) from None
        self._fits().append(fit)


class _TensorBoardFit:
    """The event file of one fit. After an error of the storage nothing more is written, and the training continues."""

    def __init__(self, folder: Path, run: DriverRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(os.fspath(folder))
        self._folder = folder
        self._workers: int | None = None
        self._epochs = 0
        self._failed = False
        lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in run.settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *(line.replace("\n", " ") for line in lines)])
        self._write(lambda: self._writer.add_text("settings", table, 0))

    def epoch(self, row: Row) -> None:
        epoch, at = int(row["epoch"]), float(row["ended"])
        self._epochs = epoch + 1
        given = {tag_of(name): value for name, value in row.items() if name not in ("epoch", "ended")}
        values = {tag: float(value) for tag, value in given.items() if value is not None}
        if self._workers is not None:
            values["workers"] = self._workers  # at each epoch, or a chart would draw a slope between two changes

        def write() -> None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, epoch, at)

        self._write(write)

    def change(self, change: MembershipChange) -> None:
        step, self._workers = self._epochs, change.after
        self._write(lambda: self._writer.add_scalar("workers", change.after, step, change.at))
        self._write(lambda: self._writer.add_text("events", str(change), step, change.at))

    def end(self, result: DriverResult) -> None:
        if result.error is not None:
            text = redacted(f"the fit failed: {type(result.error).__name__}: {result.error}")
            self._write(lambda: self._writer.add_text("events", text, self._epochs))
        self._write(self._writer.close)

    def _write(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
            self._writer.flush()
        except Exception as error:
            self._failed = True
            log.warning(
                "nothing more is written for TensorBoard to %s: %s: %s", self._folder, type(error).__name__, error
            )


def tag_of(name: str) -> str:
    """Return TensorBoard's tag for a column of the history. Values of both splits are in one section."""
    if name in FACTS:
        return f"training/{name}"
    return f"{name.removeprefix('val_')}/{'validation' if name.startswith('val_') else 'train'}"
