"""TensorBoardCallback: write a fit's epochs and changes of the workers for TensorBoard, from the driver."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError, MissingExtraError
from spark_elastic.jobs.driver_callbacks import DriverCallback, DriverResult, DriverRun
from spark_elastic.redaction import redacted
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import Row

log = logging.getLogger("spark_elastic.tensorboard")

_URI = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+:/|file:")
_FACTS = {"lr": "training/lr", "seconds": "training/seconds", "rows": "training/rows", "steps": "training/steps"}


class TensorBoardCallback(DriverCallback):
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

    decides_within_s = 0.0

    def __init__(self, log_dir: str | os.PathLike[str], *, run_name: str | None = None) -> None:
        check_installed()
        if _URI.match(os.fspath(log_dir)):
            raise InvalidSettingsError(
                f"log_dir must be a folder of the driver's machine, not the URI {os.fspath(log_dir)!r}; write to a "
                "folder, mounted or copied afterwards"
            )
        self.log_dir = Path(log_dir)
        self.run_name = run_name
        self._fits = threading.local()
        """The fits of each thread: all events of a fit come on one."""

    def on_fit_start(self, run: DriverRun) -> None:
        name = self.run_name or run.run_id or datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
        try:
            fit = TensorBoardFit(self.log_dir / name, run)
        except OSError as error:
            raise InvalidSettingsError(
                f"TensorBoardCallback cannot write to {self.log_dir / name}: {error}; give a log_dir that this program "
                "may write to"
            ) from None
        self._present().append(fit)

    def on_epoch_end(self, row: Row) -> None:
        self._present()[-1].epoch(row)

    def on_membership_change(self, change: MembershipChange) -> None:
        self._present()[-1].change(change)

    def on_fit_end(self, result: DriverResult) -> None:
        self._present().pop().end(result)

    def _present(self) -> list[TensorBoardFit]:
        """Return the fits that run on this thread. The last has begun within an event of the one before it."""
        if not hasattr(self._fits, "present"):
            self._fits.present = []
        fits: list[TensorBoardFit] = self._fits.present
        return fits


class TensorBoardFit:
    """The event file of one fit. After an error of the storage nothing more is written, and the training continues."""

    def __init__(self, folder: Path, run: DriverRun) -> None:
        self._folder = folder
        self._workers: int | None = None
        self._epochs = 0
        self._failed = False
        self._file = EventFile(folder)
        lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in run.settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *(line.replace("\n", " ") for line in lines)])
        self._write(lambda: self._file.text("settings", table, 0, clock.wall()))

    def epoch(self, row: Row) -> None:
        epoch, at = int(row["epoch"]), float(row["ended"])
        self._epochs = epoch + 1
        values = {
            tag_of(name): float(value)
            for name, value in row.items()
            if name not in ("epoch", "ended") and value is not None
        }
        if self._workers is not None:
            values["workers"] = self._workers  # at each epoch, or a chart would draw a slope between two changes
        self._write(lambda: self._file.scalars(values, epoch, at))

    def change(self, change: MembershipChange) -> None:
        step, self._workers = self._epochs, change.after
        self._write(lambda: self._file.scalars({"workers": change.after}, step, change.at))
        self._write(lambda: self._file.text("events", str(change), step, change.at))

    def end(self, result: DriverResult) -> None:
        if result.error is not None:
            text = redacted(f"the fit failed: {type(result.error).__name__}: {result.error}")
            self._write(lambda: self._file.text("events", text, self._epochs, clock.wall()))
        self._write(self._file.close)
        with contextlib.suppress(OSError):
            self._file.close()  # after an error too, which has been said

    def _write(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:
            self._failed = True
            log.warning(
                "nothing more is written for TensorBoard to %s: %s: %s", self._folder, type(error).__name__, error
            )


class EventFile:
    """A new file of TensorBoard's event format in a folder.

    Written with tensorboard's own messages and records, and not with its writers, which import TensorFlow where that is
    installed: seconds, and lines on the screen.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{clock.wall():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / f"{name}.{next(_numbers)}").open("wb")
        self._records = _module("summary.writer.record_writer").RecordWriter(self._file)
        self._event = _module("compat.proto.event_pb2").Event
        self._summary = _module("compat.proto.summary_pb2").Summary
        self._add(self._event(wall_time=clock.wall(), file_version="brain.Event:2"))

    def scalars(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Add values by tag."""
        summary = self._summary(value=[{"tag": tag, "simple_value": value} for tag, value in values.items()])
        self._add(self._event(wall_time=at, step=step, summary=summary))

    def text(self, tag: str, text: str, step: int, at: float) -> None:
        """Add a text, which may be Markdown."""
        metadata = {"plugin_data": {"plugin_name": "text"}}
        tensor = {"dtype": _STRING, "string_val": [text.encode()], "tensor_shape": {}}
        summary = self._summary(value=[{"tag": tag, "metadata": metadata, "tensor": tensor}])
        self._add(self._event(wall_time=at, step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


_numbers = itertools.count()
_STRING = 7
"""TensorFlow's number of the type of texts, DT_STRING."""


def _module(name: str) -> Any:
    return import_module(f"tensorboard.{name}")


def tag_of(name: str) -> str:
    """Return TensorBoard's tag for a column of the history. Values of both splits are in one section."""
    if name in _FACTS:
        return _FACTS[name]
    return f"{name.removeprefix('val_')}/{'validation' if name.startswith('val_') else 'train'}"


def check_installed() -> None:
    """Raise `MissingExtraError` if tensorboard is not installed."""
    try:
        import_module("tensorboard")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "tensorboard":
            raise
        raise MissingExtraError(what="TensorBoardCallback", package="tensorboard", extra="tensorboard") from None
