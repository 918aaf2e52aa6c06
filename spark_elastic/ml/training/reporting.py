"""How far the training is, told to the driver from rank 0 on a thread of its own: no step does anything for it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from typing import TYPE_CHECKING

from spark_elastic.ml.training.progress import Phase, Progress
from spark_elastic.reporting.history import FACTS, Row
from spark_elastic.wire import worker_link
from spark_elastic.wire.messages import EpochEnded, LiveProgress, Notice
from spark_elastic.wire.worker_link import WorkerLink

if TYPE_CHECKING:
    from spark_elastic.ml.training.trainer import Trainer

log = logging.getLogger("spark_elastic.ml")

MAX_NOTICE = 1000
INTERVAL_S = 0.25
"""Between two looks at the training. A person sees no more, and a look costs well below a millisecond."""
LAST_WORDS_S = 1.0
"""How long the end of a training waits for what is still to be told."""


class Reporter:
    """Looks at `trainer.state.at`, which is replaced as a whole after each step and never changed.

    Whoever is rank 0 tells: first the epochs that this worker has seen the end of, of which the driver passes over
    those that it knows already, and then where it stands.
    """

    def __init__(self, trainer: Trainer, link: WorkerLink) -> None:
        self._trainer = trainer
        self._link = link
        self._told = 0
        """Rows of the history that were told, or were there before."""
        self._serial = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-report", daemon=True)

    def begin(self) -> None:
        self._told = len(self._trainer.state.at.history)
        self._thread.start()

    def close(self) -> None:
        """Tell the rest."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(LAST_WORDS_S)

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        # the training thread goes on meanwhile: what is looked at may be of two moments, which harms nobody
        with contextlib.suppress(Exception):
            at = self._trainer.state.at
            if self._trainer.rank == 0 and at.serial != self._serial:
                self._serial = at.serial
                self._tell(at)

    def _tell(self, at: Progress) -> None:
        epochs = self._trainer.training.epochs
        while self._told < len(at.history):
            row = at.history[self._told]
            if not self._link.show(EpochEnded(row["epoch"], epochs, float(row["seconds"]), measured(row))):
                return
            self._told += 1
        dataset = self._trainer.training.dataset
        if at.phase is Phase.TRAIN:
            rows, total = at.position, dataset.rows("train")
        elif at.phase is Phase.VALIDATE:
            rows, total = at.val_position, dataset.rows("validation")
        else:
            return
        values = self._trainer.engine.told(at.sums) if at.sums.size else {}
        shown = {name: value for name, value in values.items() if math.isfinite(value)}
        self._link.show(LiveProgress(at.epoch, epochs, at.phase.value, min(rows, total), total, shown))


def notify(text: str) -> None:
    """Say something to people: in the log here, and by the driver, as a line and as one of the job's changes."""
    log.warning("%s", text)
    link = worker_link.current()
    if link is not None:
        link.show(Notice(text[:MAX_NOTICE]))


def reporter_of(trainer: Trainer) -> Reporter | None:
    """None: nobody wants to know, or there is no driver to tell."""
    link = worker_link.current()
    return Reporter(trainer, link) if trainer.training.verbose and link is not None else None


def measured(row: Row) -> dict[str, float]:
    """The loss and the metrics of an epoch."""
    return {name: float(value) for name, value in row.items() if name not in FACTS and value is not None}
