"""Views of a training in progress: what callbacks see of it, and what rank 0 reports to the driver."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Sequence

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import Callback, Logs, followed_value
from spark_elastic.ml.training.engine import Engine, TrainingState
from spark_elastic.ml.training.spec import Progress, Training, TrainingPhase
from spark_elastic.reporting.history import FACTS, History, Row
from spark_elastic.wire.messages import EpochEnded, LiveProgress
from spark_elastic.wire.worker_link import WorkerLink

REPORT_INTERVAL_S = 0.25  # time between two reports. A person sees no more, and a report costs well below a millisecond
CLOSE_TIMEOUT_S = 1.0  # longest wait for the last report at the end of a training


class RunView:
    """The training as callbacks see it (`callbacks.Run`), and what callbacks have requested of it."""

    def __init__(self, training: Training, engine: Engine, state: TrainingState) -> None:
        self.training = training
        self.engine = engine
        self.epochs = training.epochs
        self.model, self.optimizer = engine.model, engine.optimizer
        self._state = state
        self.rank, self.size = 0, 1
        self._logs: tuple[int, Logs] = (-1, {})  # the last `logs`, with the `serial` that they were computed at
        self.step_seconds = [0.0]
        """The time of a step, and how long each rank works in it: moving averages. No ranks: unknown."""
        self.timed = [0.0, 0.0]
        """The seconds of this epoch's steps in this world whose times are known, and each rank's work in them."""
        self.wants_restore = False
        self.caller = Callback()  # the callback whose `on_epoch_end` is running
        self.stop_reason = ""  # set by `stop` and never cleared: all act on it at the next reduction
        self.clear_requests()

    def clear_requests(self) -> None:
        """Drop what callbacks requested, once it is done, or when the failed epoch end will call them again."""
        self.wants_checkpoint = False
        self.wants_best = False
        self.best_of: list[str] = []

    @property
    def at(self) -> Progress:
        return self._state.at

    @property
    def epoch(self) -> int:
        return self.at.epoch

    @property
    def step(self) -> int:
        return self.at.step

    @property
    def history(self) -> History:
        return self.at.history

    @property
    def logs(self) -> Logs:
        at = self.at
        if self._logs[0] != at.serial:
            self._logs = at.serial, self.engine.metrics.logs(at.sums, at.pieces) if at.sums.size else {}
        return self._logs[1]

    def note_step(self, step_s: float, worked_ns: Sequence[float]) -> None:
        """Count the time of a step, and how long each rank worked in it; 0: unknown."""
        if worked_ns and all(worked_ns):
            now = [step_s, *(each / 1e9 for each in worked_ns)]
            before = self.step_seconds if len(self.step_seconds) == len(now) else now
            self.step_seconds = [0.9 * then + 0.1 * each for then, each in zip(before, now, strict=True)]
            self.timed = [total + each for total, each in zip(self.timed, now, strict=True)]

    def work(self) -> list[Row]:
        """Return this epoch's rows of `History.work`."""
        total_s, *worked_s = self.timed
        return [
            {"epoch": self.epoch, "rank": rank, "work_s": each, "wait_s": max(0.0, total_s - each)}
            for rank, each in enumerate(worked_s)
            if self.size > 1 and each
        ]

    def stop(self, reason: str) -> None:
        self.stop_reason = reason or "a callback requested the end of the training"

    def checkpoint(self, *, best: bool = False) -> None:
        self.wants_checkpoint = True
        if best:
            # A callback that does not restore follows another value: its best epoch marks a checkpoint, but must not
            # replace the weights that the restoring callback goes back to.
            self.wants_best = self.wants_best or self.caller.restores_best
            self.best_of += [name for name in [followed_value(self.caller)] if name not in self.best_of]

    def restore_best(self) -> None:
        if self.engine.best is None:
            raise InvalidSettingsError("a callback that calls restore_best() has to set `restores_best = True`")
        self.wants_restore = True


class Reporter:
    """Reports the progress of a training to the driver, on its own thread, so that no step waits for it.

    Rank 0 alone reports, also of a silent training, which has a status page: first the epochs whose end this worker has
    seen (the driver ignores those that it knows already), then the present position.
    """

    def __init__(self, run: RunView, link: WorkerLink) -> None:
        self._run = run
        self._link = link
        self._reported_epochs = 0  # or there before
        self._serial = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spark_elastic-report", daemon=True)

    def start(self) -> None:
        self._reported_epochs = len(self._run.history)
        self._thread.start()

    def close(self) -> None:
        """Send the last report and end the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while not self._closing.wait(REPORT_INTERVAL_S):
            self.report()
        self.report()

    def report(self) -> None:
        """Report what is new, if this worker is rank 0. Raises nothing: a lost report harms no training."""
        # The training thread runs on meanwhile: values of two moments may be mixed, which is harmless in a display.
        with contextlib.suppress(Exception):
            at = self._run.at
            if self._run.rank == 0 and at.serial != self._serial:
                self._serial = at.serial
                self._send(at)

    def _send(self, at: Progress) -> None:
        training = self._run.training
        while self._reported_epochs < len(at.history):
            row = at.history[self._reported_epochs]
            ended = EpochEnded(int(row["epoch"]), training.epochs, float(row["seconds"]), loss_and_metrics(row))
            if not self._link.show(ended):
                return
            self._reported_epochs += 1
        if at.phase is TrainingPhase.TRAIN:
            rows, total = at.position, training.dataset.rows("train")
        elif at.phase is TrainingPhase.VALIDATE:
            rows, total = at.val_position, training.dataset.rows("validation")
        else:
            return
        values = self._run.engine.metrics.live_logs(at.sums) if at.sums.size else {}
        shown = {name: value for name, value in values.items() if math.isfinite(value)}
        step_s, *worked_s = self._run.step_seconds
        done = min(rows, total)
        self._link.show(
            LiveProgress(at.epoch, training.epochs, at.phase.value, done, total, shown, step_s, tuple(worked_s))
        )


class EpochRows:
    """Hands the rows of finished epochs to the driver's callbacks, perhaps twice, and asks for their decision."""

    def __init__(self, run: RunView, link: WorkerLink, wait_s: float) -> None:
        self._run = run
        self._link = link
        self._wait_s = wait_s
        self._sent = 0  # rows of the history that were sent, or were there before this worker began

    def start(self) -> None:
        self._sent = len(self._run.history)

    def resend(self) -> None:
        """Send the rows that an earlier rank 0 may not have sent. Called in each new world."""
        history = self._run.history
        if self._run.rank == 0:
            for row in history[self._sent :]:
                self._link.report_epoch(int(row["epoch"]), json.dumps(dict(row)).encode())
            self._sent = len(history)

    def ended(self, row: Row) -> str:
        """Send the row of the epoch that ends. Returns the reason to end the training after it, or ""."""
        if self._run.rank != 0:
            return ""
        epoch, text = int(row["epoch"]), json.dumps(dict(row)).encode()
        self._sent = epoch + 1
        # The other workers wait in a collective meanwhile, and must not be taken for stuck.
        longest_s = min(self._wait_s, self._link.stall_timeout_s / 2 or self._wait_s)
        return self._link.report_epoch(epoch, text, longest_s)


def loss_and_metrics(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name not in FACTS and value is not None}
